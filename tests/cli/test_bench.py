"""`mimo bench`: what is measured is told rightly, and what is asked for wrongly is refused before minutes are spent."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from cli import bench_media
from cli.app import app
from cli.bench_case import (
    MORE_IS_BETTER,
    Bars,
    BenchFailed,
    Case,
    Contender,
    Contest,
    Findings,
    Panel,
    Result,
    Setting,
    run_case,
    times_better,
)
from cli.bench_choice import chosen_cases, runnable_cases
from cli.bench_machine import Busyness, cpu_by_descendant, describe_machine, ffmpeg_version, own_cpu_s
from cli.bench_report import as_json, joined_panels, show, show_cases, ticks_between, write_plot
from cli.load import ConfigError

FIELDS = {"name", "ours", "baseline", "unit", "ratio", "limit", "of_limit", "runs"}


class Steps:
    """Progress, remembered."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []
        self.num_done = 0

    def begin(self, what: str, total: int) -> None:
        self.steps.append((what, total))

    def advance(self, amount: int = 1) -> None:
        self.num_done += amount


def setting(cache_dir: Path) -> Setting:
    return Setting(cache_dir=cache_dir, num_threads=1, quick=True)


def figures(*values: float, log: list[str] | None = None, who: str = "") -> Contender:
    left = list(values)

    def run() -> float:
        if log is not None:
            log.append(who)
        return left.pop(0)

    return run


def case(contest: Contest, name: str = "media.some", **fields: Any) -> Case:
    @contextmanager
    def opened(_: Setting, bars: Bars) -> Iterator[Contest]:
        bars.begin("making", 1)
        yield contest

    words = {"ours": "our way", "baseline": "their way", "limit": "the bottom"}
    return Case(name=name, open=opened, **({"unit": "s"} | words | fields))


def test_ratios_are_taken_within_a_round(tmp_path: Path) -> None:
    """The machine was twice as slow in the second round: ratios do not notice."""
    contest = Contest(
        detail="three rounds",
        ours=figures(1.0, 2.0, 1.0),
        baseline=figures(3.0, 6.0, 3.5),
        limit=figures(0.5, 1.0, 0.8),
    )
    steps = Steps()
    found = run_case(case(contest), setting(tmp_path), runs=3, bars=steps).as_json()
    assert set(found) >= FIELDS
    assert (found["ours"], found["baseline"], found["limit"]) == (1.0, 3.5, 0.8)
    assert (found["ratio"], found["of_limit"], found["runs"]) == (3.0, 0.5, 3)
    assert found["samples"]["baseline"] == [3.0, 6.0, 3.5]
    assert steps.steps == [("making", 1), ("media.some: running", 9)]
    assert steps.num_done == 9


def test_contenders_take_turns(tmp_path: Path) -> None:
    log: list[str] = []
    contest = Contest(
        detail="",
        ours=figures(1, 1, 1, log=log, who="ours"),
        baseline=figures(1, 1, 1, log=log, who="plain"),
        limit=figures(1, 1, 1, log=log, who="limit"),
    )
    run_case(case(contest), setting(tmp_path), runs=3, bars=Steps())
    assert log == ["ours", "plain", "limit", "plain", "limit", "ours", "limit", "ours", "plain"]


def test_fixed_and_absent_contenders(tmp_path: Path) -> None:
    bound = Contest(detail="", ours=figures(512.0, 500.0), baseline=1024.0)
    found = run_case(case(bound), setting(tmp_path), runs=2, bars=Steps()).as_json()
    assert found["ratio"] == pytest.approx(2.024)
    assert (found["limit"], found["of_limit"]) == (None, None)
    once = run_case(case(Contest(detail="", ours=figures(2.0)), max_runs=1), setting(tmp_path), runs=9, bars=Steps())
    assert (once.as_json()["runs"], once.ratio, once.baseline) == (1, None, None)


def test_a_ratio_above_1_says_that_ours_is_better_whatever_the_unit(tmp_path: Path) -> None:
    assert times_better(2.0, 6.0, "s") == times_better(2.0, 6.0, "MB") == 3.0
    assert {"req/s", "GFLOP/s", "tok/MiB", "hits"} == MORE_IS_BETTER
    for unit in MORE_IS_BETTER:
        assert times_better(6.0, 2.0, unit) == 3.0
    assert (times_better(1.0, 0.0, "hits"), times_better(0.0, 0.0, "hits")) == (float("inf"), 1.0)
    rates = Contest(detail="", ours=figures(30.0, 60.0), baseline=figures(10.0, 15.0), limit=120.0)
    found = run_case(case(rates, unit="req/s"), setting(tmp_path), runs=2, bars=Steps()).as_json()
    assert (found["ratio"], found["of_limit"]) == (3.5, 0.375)
    nothing = Contest(detail="", ours=figures(0.5), baseline=figures(0.0))
    found = run_case(case(nothing, unit="hits"), setting(tmp_path), runs=1, bars=Steps()).as_json()
    assert json.loads(json.dumps(found, allow_nan=False))["ratio"] is None


def test_findings_are_asked_for_after_the_last_round(tmp_path: Path) -> None:
    log: list[str] = []

    def found() -> Findings:
        log.append("findings")
        return Findings(lines=("p50 3 ms",), figures={"p50_s": 0.003})

    contest = Contest(detail="", ours=figures(1, 2, log=log, who="ours"), findings=found)
    done = run_case(case(contest), setting(tmp_path), runs=2, bars=Steps())
    assert log == ["ours", "ours", "findings"]
    assert done.as_json()["figures"] == {"p50_s": 0.003}
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    show(console, [done])
    console.file.close()
    assert "  p50 3 ms" in console.export_text()


def result(name: str = "media.some", *, ours: float = 0.5, unit: Any = "s", others: float | None = 0.0) -> Result:
    made = Case(name=name, unit=unit, ours="a", baseline="b", limit="c", open=case(Contest(detail="", ours=float)).open)
    samples = {"ours": [ours], "baseline": [2.0], "limit": [0.25]}
    return Result(case=made, detail="an input", samples=samples, others_share=others)


def test_the_table_fits_80_columns_and_tells_of_noise() -> None:
    console = Console(width=80, record=True, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    others = [result("media.noisy", ours=123.0, unit="MB", others=0.4), result("media.hits", ours=0.4567, unit="hits")]
    show(console, [result("media.video_gop250_1fps_decode"), result("media.rate", ours=17.5, unit="req/s"), *others])
    console.file.close()
    text = console.export_text()
    assert max(map(len, text.splitlines()[:8])) <= 80
    assert re.search(r"rate +17.5 /s +2 /s +8.75x", text)
    assert re.search(r"hits +45.7% +200.0% +0.23x", text)
    assert re.search(r"video_gop250_1fps_decode +500 ms +2 s +4.00x +250 ms +0.50 +1\b", text)
    assert "123 MB" in text
    assert "media.noisy: others took 40% of the machine" in text
    assert "…" not in text
    assert "media.video_gop250_1fps_decode: others" not in text


def test_a_busy_machine_is_no_matter_for_what_is_counted() -> None:
    console = Console(width=80, record=True, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    counted = result("media.counted", others=0.9)
    show(console, [replace(counted, case=replace(counted.case, is_counted=True)), result("media.timed", others=0.9)])
    console.file.close()
    assert re.findall(r"(\S+): others took", console.export_text()) == ["media.timed"]


def test_json_is_the_contract() -> None:
    machine = describe_machine(["numpy", "no-such-package"], num_threads=2, quick=True)
    found = json.loads(json.dumps(as_json(machine, [result()])))
    assert set(found) == {"machine", "results"}
    assert set(found["results"][0]) >= FIELDS
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["versions"]["numpy"]
    assert found["machine"]["versions"]["no-such-package"] is None
    assert found["machine"]["versions"]["ffmpeg"] == ffmpeg_version()
    assert found["machine"]["quick"] is True


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    target = tmp_path / "plot.png"
    slower = result("media.slower", ours=4.0)
    write_plot(target, "title", [result(), slower, result("media.urls", ours=0.01)])
    with Image.open(target) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width > 800
        # Something is drawn in the colours of a bar and of a limit.
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert {(0x2F, 0x6F, 0xB5), (0xC2, 0x45, 0x2D)} <= colours


def test_the_plot_has_panels_for_curves(tmp_path: Path) -> None:
    curves = {"ours": [(1, 0.1), (64, 0.9)], "plain way": [(1, 0.1), (64, 5.0)]}
    panels = tuple(Panel(title=word, x_label="x", y_label="y", curves=curves) for word in ("latency", "rate", "more"))
    bare, drawn = tmp_path / "bare.png", tmp_path / "drawn.png"
    write_plot(bare, "title", [result()])
    write_plot(drawn, "title", [replace(result(), findings=Findings(panels=panels))])
    with Image.open(bare) as small, Image.open(drawn) as large:
        assert large.width == small.width
        assert large.height == small.height + 2 * round(4.2 * 140)


def test_parts_of_one_picture_are_drawn_as_one(tmp_path: Path) -> None:
    def part(x: float, *, title: str = "first token", **curves: float) -> Panel:
        points = {who: [(x, y)] for who, y in curves.items()}
        return Panel(title=title, x_label="tokens", y_label="ms", curves=points, y_is_logarithmic=True)

    parts = [part(32, L1=3.0, cold=900.0), part(8, L1=2.0), part(8, title="other", L1=1.0), part(8, heal=20.0)]
    first, other = joined_panels(parts)
    assert first.curves == {"L1": [(8, 2.0), (32, 3.0)], "cold": [(32, 900.0)], "heal": [(8, 20.0)]}
    assert other == parts[2]
    assert len(joined_panels([replace(parts[1], y_is_logarithmic=False), parts[1]])) == 2
    together, apart = tmp_path / "together.png", tmp_path / "apart.png"
    write_plot(together, "title", [replace(result(), findings=Findings(panels=(part,))) for part in parts[:2]])
    write_plot(apart, "title", [replace(result(), findings=Findings(panels=tuple(parts)))])
    assert together.stat().st_size > 10_000
    assert apart.stat().st_size > together.stat().st_size


def test_busyness_counts_others_and_not_ourselves() -> None:
    busyness = Busyness()
    sum(index * index for index in range(3_000_000))
    share = busyness.others_share()
    assert share is None or 0.0 <= share <= 1.0


def test_cpu_time_of_processes_below_is_ours_while_they_live() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    shell = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", spin]
    before_s = own_cpu_s()
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = cpu_by_descendant()
        assert process.pid in used
        assert sum(used.values()) >= 0.25, "of the shell's child, which is ours as well"
        assert own_cpu_s() - before_s >= 0.25
        process.communicate(b"\n")
    assert process.pid not in cpu_by_descendant()
    assert own_cpu_s() - before_s >= 0.25, "also once it has ended"


def run(*arguments: str, cache: Path) -> Any:
    return CliRunner(env={"MIMO_CACHE_DIR": str(cache)}).invoke(app, ["bench", "media", *arguments])


def test_real_cases_on_tiny_inputs(tmp_path: Path) -> None:
    names = ["media.urls100_200ms", "media.jpeg12mp_batch64", "media.video_gop25_1fps"]
    only = [word for name in names for word in ("--only", name.partition(".")[2])]
    json_file, plot = tmp_path / "found.json", tmp_path / "found.png"
    done = run(
        *("--quick", "--runs", "1", "--threads", "1", *only, "--json", str(json_file), "--plot", str(plot)),
        cache=tmp_path / "cache",
    )
    assert done.exit_code == 0, done.output
    found = json.loads(json_file.read_text())
    assert {each["name"] for each in found["results"]} == set(names)
    for each in found["results"]:
        assert set(each) >= FIELDS
        assert each["ours"] > 0
        assert each["baseline"] > 0
        assert each["ratio"] == pytest.approx(each["baseline"] / each["ours"], rel=1e-3)
        assert each["runs"] == 1
    urls = next(each for each in found["results"] if each["name"] == names[0])
    # Ten answers of 20 ms one after another, against all at once.
    assert urls["baseline"] >= 0.2
    assert urls["ours"] >= 0.02
    assert urls["limit"] == 0.02
    assert found["machine"]["threads"] == 1
    with Image.open(plot) as image:
        assert image.format == "PNG"
    left = [path.name for path in (tmp_path / "cache" / "bench").iterdir()]
    assert len(left) >= 5
    assert not [name for name in left if "partial" in name]


def test_list_tells_every_case(tmp_path: Path) -> None:
    done = run("--list", cache=tmp_path)
    assert done.exit_code == 0
    for each in bench_media.CASES:
        assert each.name in done.stdout
        assert each.baseline in done.stdout
    show_cases(Console(quiet=True), bench_media.CASES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--only", "nonsense"],
            "--only names 'nonsense'; allowed, with or without media., or how they begin:\n  media.video_gop250_1fps, ",
        ),
        (["--json", "/no/such/place/x.json"], "no such directory /no/such/place"),
        (["--plot", "x.jpg"], "ends in .png"),
        (["--plot", "/no/such/place/x.png"], "no such directory"),
        (["--json", "/tmp"], "is a directory"),
        (["--json", "--quick"], "--json needs a file name, not --quick"),
    ],
)
def test_wrong_settings(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = run(*arguments, cache=tmp_path)
    assert isinstance(done.exception, ConfigError), "main turns it into exit code 2"
    assert words in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.bench.find_spec", lambda name: None)
    done = run("--plot", str(tmp_path / "x.png"), cache=tmp_path)
    assert "pip install 'mimo-epd[bench]'" in str(done.exception)


def test_plot_with_a_matplotlib_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("--plot", str(tmp_path / "x.png"), cache=tmp_path)
    assert isinstance(done.exception, ConfigError)
    assert "does not load" in str(done.exception)
    assert "'mimo-epd[bench]'" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--runs", "0"], ["--runs", "x"], ["--threads", "0"], ["--threads", "1000000"], ["--nonsense"]]
)
def test_wrong_flags_exit_2(tmp_path: Path, arguments: list[str]) -> None:
    assert run(*arguments, cache=tmp_path).exit_code == 2


def test_help_names_everything() -> None:
    group = CliRunner().invoke(app, ["bench", "--help"])
    media = CliRunner().invoke(app, ["bench", "media", "--help"])
    assert group.exit_code == media.exit_code == 0
    assert "media" in group.stdout
    assert "Example: mimo bench media --quick" in group.stdout
    for flag in ("--only", "--runs", "--quick", "--threads", "--json", "--plot", "--list"):
        assert flag in media.stdout
    assert CliRunner().invoke(app, ["bench"]).exit_code == 2


def test_a_fault_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all cases, those after it too; a fault nobody thought of as well."""

    def failing(error: Exception) -> Contender:
        def run() -> float:
            raise error

        return run

    good = [case(Contest(detail="", ours=figures(1.0), baseline=2.0), f"media.good_{at}") for at in range(3)]
    broken = [BenchFailed("it broke"), ZeroDivisionError("nothing"), ImportError("no symbol", name="others")]
    bad = [case(Contest(detail="", ours=failing(error)), f"media.bad_{at}") for at, error in enumerate(broken)]
    also = case(Contest(detail="", ours=failing(BenchFailed("it broke"))), "media.bad_too")
    monkeypatch.setattr(bench_media, "CASES", (good[0], bad[0], good[1], bad[1], also, bad[2], good[2]))
    json_file = tmp_path / "found.json"
    done = run("--runs", "1", "--json", str(json_file), "--plot", str(tmp_path / "found.png"), cache=tmp_path)
    assert done.exit_code == 1
    assert "media.bad_0, media.bad_too: it broke" in done.stderr
    assert "media.bad_1: ZeroDivisionError: nothing" in done.stderr
    assert "media.bad_2: others is there and does not load (no symbol); pip install" in done.stderr
    found = json.loads(json_file.read_text())
    assert [each["name"] for each in found["results"]] == ["media.good_0", "media.good_1", "media.good_2"]
    assert [each["name"] for each in found["failed"]] == ["media.bad_0", "media.bad_1", "media.bad_too", "media.bad_2"]
    assert found["failed"][0]["reason"] == "it broke"
    assert "good_2" in done.stdout
    assert (tmp_path / "found.png").exists()


def test_only_takes_names_and_how_names_begin() -> None:
    cases = [case(Contest(detail="", ours=1.0), name) for name in ("kv.hit", "kv.hit_low", "kv.sweep", "kv.kv_x")]  # type: ignore[arg-type]

    def chosen(*named: str) -> list[str]:
        return [each.name.partition(".")[2] for each in chosen_cases(cases, named, "kv")]

    assert chosen() == chosen("kv") == chosen("kv.") == ["hit", "hit_low", "sweep", "kv_x"]
    assert chosen("hit") == chosen("kv.hit") == ["hit"]
    assert chosen("hi") == chosen("kv.h") == ["hit", "hit_low"]
    assert chosen("sweep", "hit_l") == ["hit_low", "sweep"], "in the order of the bench"
    for wrong in ("it", "kv.kv.hit", "", "hits"):
        with pytest.raises(ConfigError, match=r"kv\.hit, kv\.hit_low, kv\.sweep") as refused:
            chosen("hit", wrong)
        assert repr(wrong) in str(refused.value)
    many = [case(Contest(detail="", ours=1.0), f"kv.some_long_name_{at}") for at in range(40)]  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        chosen_cases(many, ["x"], "kv")
    assert max(map(len, str(refused.value).splitlines())) <= 100


def test_cases_without_their_package_are_left_out_or_refused() -> None:
    plain = case(Contest(detail="", ours=1.0), "kv.plain")  # type: ignore[arg-type]
    bound = replace(plain, name="kv.bound", needs="no_such_package")
    assert runnable_cases([plain], are_named=True, extra="test") == ([plain], None)
    left, words = runnable_cases([plain, bound], are_named=False, extra="test")
    assert left == [plain]
    assert words == "left out: kv.bound: not installed, but needed: no_such_package; pip install 'mimo-epd[test]'"
    with pytest.raises(ConfigError, match=r"kv\.bound: not installed, but needed: no_such_package"):
        runnable_cases([plain, bound], are_named=True, extra="test")


def test_list_tells_the_cases_of_only(tmp_path: Path) -> None:
    done = run("--list", "--only", "audio", cache=tmp_path)
    assert re.findall(r"^media\.\w+", done.stdout, re.MULTILINE) == ["media.audio_10min", "media.audio_10min_m4a"]
    assert isinstance(run("--list", "--only", "nonsense", cache=tmp_path).exception, ConfigError)


@pytest.mark.parametrize("width", [20, 30, 40, 60])
def test_names_are_whole_on_narrow_terminals(width: int) -> None:
    console = Console(width=width, record=True, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    show(console, [result("media.video_gop250_1fps_decode"), result("media.rate", ours=17.5, unit="req/s")])
    console.file.close()
    lines = console.export_text().splitlines()
    assert "video_gop250_1fps_decode" in lines
    assert "  of limit  0.50" in lines
    assert "  ours      17.5 /s" in lines


def test_output_that_is_piped_is_not_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "media." + "a_rather_long_name_" * 6
    monkeypatch.setattr(bench_media, "CASES", (case(Contest(detail="word " * 60, ours=figures(1.0)), name),))
    monkeypatch.setenv("COLUMNS", "40")
    done = run("--runs", "1", cache=tmp_path)
    assert any(line.split()[:3] == [name.partition(".")[2], "1", "s"] for line in done.stdout.splitlines()), done.stdout
    assert f"{name}: {'word ' * 60}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 500


def test_ticks_are_a_few_short_numbers_within_the_axis() -> None:
    for low, high in ((0.7, 1.3), (0.9, 5.0), (0.75, 50.0), (0.5, 3e6), (0.95, 1.6)):
        ticks = ticks_between(low, high)
        assert 3 <= len(ticks) <= 15
        assert all(low <= tick <= high for tick in ticks)
        assert 1 in ticks
        assert all(len(f"{tick:.12g}") <= 7 for tick in ticks)


def test_an_interruption_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    good = case(Contest(detail="", ours=figures(1.0), baseline=2.0), "media.good")
    monkeypatch.setattr(bench_media, "CASES", (good, case(Contest(detail="", ours=interrupted), "media.other"), good))
    json_file = tmp_path / "found.json"
    done = run("--runs", "1", "--json", str(json_file), cache=tmp_path)
    assert done.exit_code == 130
    assert "mimo bench: interrupted; 1 of 3 cases were done" in done.stderr
    assert [each["name"] for each in json.loads(json_file.read_text())["results"]] == ["media.good"]


def test_names_are_what_others_compare_by() -> None:
    assert [each.name for each in bench_media.CASES] == [
        *("media.video_gop250_1fps", "media.video_gop250_1fps_decode", "media.video_gop25_1fps"),
        *("media.video_gop25_1fps_decode", "media.video_gop25_keys_decode"),
        *("media.video_1h_memory", "media.jpeg12mp_batch64", "media.png4mp_batch16", "media.webp4mp_batch16"),
        *("media.urls100_200ms", "media.audio_10min", "media.audio_10min_m4a"),
    ]
    assert chosen_cases(bench_media.CASES, ["urls100_200ms"], "media")[0].name == "media.urls100_200ms"
