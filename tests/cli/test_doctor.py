"""`mimo doctor`: what it finds on machines that lack something, and that it leaves nothing behind."""

import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cli.doctor_check import Check, worst
from cli.doctor_deployment import check_caches, check_port, check_settings, check_stale, check_store_reachable, needs_of
from cli.doctor_machine import Needs, check_machine
from cli.doctor_media import check_media
from cli.doctor_software import check_dependencies, check_software, satisfies
from cli.load_role import load_any
from cli.port_owner import port_owner

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CPU = "processor: 0\nmodel name: Test\nflags: fpu avx2 fma avx512f\n"


NOTHING = Needs()


def machine(root: Path, **files: str) -> Path:
    """A tree of /proc and /sys; the slashes of a name are written as two underscores."""
    defaults = {
        "proc__cpuinfo": CPU,
        "proc__meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
        "proc__sys__kernel__numa_balancing": "0",
        "sys__kernel__mm__transparent_hugepage__enabled": "always [madvise] never",
        "sys__devices__system__node__node0__x": "",
        "dev__shm__x": "",
    }
    for name, text in (defaults | files).items():
        path = root.joinpath(*name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(root: Path, name: str, needs: Needs = NOTHING, **files: str) -> Check:
    checks = check_machine(needs, machine(root, **files))
    return next(check for check in checks if check.name == name)


def test_a_machine_that_lacks_nothing(tmp_path: Path) -> None:
    checks = check_machine(Needs(num_files=16), machine(tmp_path))
    assert {check.level for check in checks} == {"ok"}, checks
    assert not any(check.fix for check in checks)


def test_threads_beyond_the_cores_and_a_quota(tmp_path: Path) -> None:
    few = {"sys__fs__cgroup__cpu.max": "50000 100000"}
    check = found(tmp_path, "processors", Needs(num_threads=2), **few)
    assert (check.level, check.message[:9]) == ("warn", "0.5 cores")
    assert found(tmp_path, "processors", Needs(num_threads=2, on_cpu=False), **few).level == "ok"


def test_features_of_the_processor(tmp_path: Path) -> None:
    assert found(tmp_path, "features").message == "Test: avx2, fma, avx512f"
    assert found(tmp_path, "features", proc__cpuinfo="flags: fpu sse2\n").level == "warn"


@pytest.mark.parametrize(("wanted", "level"), [(4, "ok"), (12, "warn"), (20, "fail")])
def test_memory_against_what_is_wanted(tmp_path: Path, wanted: int, level: str) -> None:
    check = found(tmp_path, "memory", Needs(memory_bytes=(wanted - 1) * GIB, weight_bytes=GIB))
    assert (check.level, bool(check.fix)) == (level, level != "ok")
    assert f"up to {wanted}.0 GiB" in check.message


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    group = {"sys__fs__cgroup__memory.max": str(2 * GIB), "sys__fs__cgroup__memory.current": str(GIB)}
    check = found(tmp_path, "memory", Needs(memory_bytes=3 * GIB), **group)
    assert check.level == "fail"
    assert check.message.startswith("1.0 GiB free of 2.0 GiB in this control group")


def test_shared_memory(tmp_path: Path) -> None:
    assert found(tmp_path, "shared memory").level == "ok"
    check = found(tmp_path, "shared memory", Needs(shared_memory_bytes=1 << 60))
    assert (check.level, "remount,size=" in check.fix, "--shm-size" in check.fix) == ("fail", True, True)
    (tmp_path / "none" / "proc").mkdir(parents=True)
    assert (
        worst([check for check in check_machine(Needs(), tmp_path / "none") if check.name == "shared memory"]) == "fail"
    )


def test_open_files_and_address_space(tmp_path: Path) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    check = found(tmp_path, "open files", Needs(num_files=soft + 1))
    assert (check.level, check.fix.startswith("ulimit -n ")) == ("warn", True)


def test_numa_balancing_matters_with_several_nodes(tmp_path: Path) -> None:
    on = {"proc__sys__kernel__numa_balancing": "1"}
    assert found(tmp_path, "numa balancing", NOTHING, **on).level == "ok"
    check = found(tmp_path, "numa balancing", NOTHING, **on, sys__devices__system__node__node1__x="")
    assert (check.level, check.fix) == ("warn", "sysctl kernel.numa_balancing=0")


def test_huge_pages_matter_on_processors(tmp_path: Path) -> None:
    off = {"sys__kernel__mm__transparent_hugepage__enabled": "always madvise [never]"}
    assert found(tmp_path, "huge pages", NOTHING, **off).level == "warn"
    assert found(tmp_path, "huge pages", Needs(on_cpu=False), **off).level == "ok"


def test_software_of_this_environment() -> None:
    checks = {check.name: check for check in check_software(wants_cuda=False, on_cpu=True)}
    assert worst(list(checks.values())) != "fail"
    assert {"python", "torch", "kernels", "dependencies"} <= set(checks)
    assert checks["kernels"].message.startswith(("compiled for this processor: few_rows", "few_rows"))


def test_dependencies_that_are_missing_or_old() -> None:
    asked = ["numpy>=1.26", "typer>=99", 'nowhere-to-be-found==1.0; extra == "x"', "absent-package>=1", "rich<1"]
    (check, *_) = check_dependencies(asked)
    assert check.level == "fail"
    assert "absent-package is not installed" in check.message
    assert "wanted is >=99" in check.message
    assert "wanted is <1" in check.message
    assert "numpy" not in check.message
    assert "nowhere" not in check.message


@pytest.mark.parametrize(
    ("installed", "wanted", "expected"),
    [
        ("2.14.1+cu130", "==2.14.1", True),
        ("2.14.0", "==2.14.1", False),
        ("3.0", "==3.0.0", True),
        ("0.9", ">=0.10", False),
        ("1.10", ">=1.9,<2", True),
        ("2.0.1", ">=1.9,<2", False),
        ("2.0rc1", "!=2", False),
    ],
)
def test_versions_are_numbers(installed: str, wanted: str, expected: bool) -> None:
    assert satisfies(installed, wanted) is expected


def test_every_format_is_decoded() -> None:
    checks = {check.name: check for check in check_media()}
    assert worst(list(checks.values())) == "ok", checks
    for name, kinds in (("pictures", "JPEG, PNG"), ("sounds", "WAV, FLAC, MP3"), ("videos", "MP4 H.264")):
        assert kinds in checks[name].message
    assert "FFmpeg" in checks["libraries"].message


def test_a_decoder_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.doctor_media._picture", lambda kind: lambda: b"no picture at all")
    check = next(check for check in check_media() if check.name == "pictures")
    assert check.level == "fail"
    assert "cannot decode JPEG (" in check.message
    assert check.fix


def test_a_taken_port_names_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check = check_port("127.0.0.1", port)
        assert check.level == "fail"
        assert f"(pid {os.getpid()})" in check.message
        assert f"(pid {os.getpid()})" in (port_owner(port) or "")
    assert check_port("127.0.0.1", port).level == "ok"
    assert port_owner(port) is None


@pytest.mark.parametrize(
    ("supervisor", "shown"),
    [
        (["/venv/bin/python", "/venv/bin/mimo", "serve", "--mode", "epd"], "mimo serve --mode epd (pid 40)"),
        (["python", "-m", "cli", "serve"], "mimo serve (pid 40)"),
        (None, "python -m cli.stage gateway (pid 50)"),
    ],
)
def test_a_stage_is_named_by_its_supervisor(tmp_path: Path, supervisor: list[str] | None, shown: str) -> None:
    fields = f"0: 0100007F:{8000:04X} 00000000:0000 0A 0:0 0:0 0 0 0 777"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(f"header\n{fields}\n")
    stage = tmp_path / "50"
    (stage / "fd").mkdir(parents=True)
    (stage / "fd" / "3").symlink_to("socket:[777]")
    (stage / "cmdline").write_bytes(b"python\0-m\0cli.stage\0gateway\0")
    (stage / "stat").write_text("50 (a (name) S 1) S 40 50 50")
    if supervisor is not None:
        (tmp_path / "40").mkdir()
        (tmp_path / "40" / "cmdline").write_bytes("\0".join(supervisor).encode())
    assert port_owner(8000, tmp_path) == shown


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A server that answers its first caller."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                if reply:
                    connection.recv(64)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            # One that nobody called would wait on.
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("reply", "level"), [(b"+PONG\r\n", "ok"), (b"-NOAUTH wanted\r\n", "ok"), (b"HTTP/1.1 400\r\n", "warn")]
)
def test_redis_answers(reply: bytes, level: str) -> None:
    with answering(reply) as port:
        (check,) = check_store_reachable(f"redis://:secret@127.0.0.1:{port}/1")
    assert check.level == level
    assert "secret" not in check.message


def test_stores_that_are_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for store in (f"redis://127.0.0.1:{port}", f"mooncake://127.0.0.1:{port}"):
        (check,) = check_store_reachable(store)
        assert (check.level, bool(check.fix)) == ("warn", True)
    assert check_store_reachable("") == check_store_reachable("local:/tmp/x") == []
    with answering(b"") as port:
        assert check_store_reachable(f"mooncake://127.0.0.1:{port}")[0].level == "ok"


def test_needs_follow_the_settings(tmp_path: Path) -> None:
    config = load_any(runtime_dir=tmp_path, environ={}, flags={"encoder": {"replicas": 2, "tower_threads": 3}})
    needs = needs_of(config)
    assert needs.num_threads == 2 * 3 + 1 + 1
    assert needs.shared_memory_bytes == (256 + 128) << 20
    assert needs.memory_bytes == 2 * (256 + 256 + 512) << 20
    assert (needs.on_cpu, needs.on_cuda) == (True, False)
    assert needs.num_files == 1024 + 8 * 256
    on_cuda = needs_of(load_any(runtime_dir=tmp_path, environ={}, flags={"engine": {"device": "cuda"}}))
    assert on_cuda.on_cuda
    assert on_cuda.memory_bytes == 2 * (256 + 512) << 20


@pytest.mark.parametrize("role", ["encoder", "gateway"])
def test_roles_are_checked_too(tmp_path: Path, role: str) -> None:
    flags: dict[str, object] = {"role": role}
    if role == "gateway":
        flags["cluster"] = {stage: ["tcp://127.0.0.1:1"] for stage in ("prefill", "decode", "encoders")}
    config = load_any(runtime_dir=tmp_path, environ={}, flags=flags)
    checks = check_settings(config)
    assert {"checkpoint", "port"} <= {check.name for check in checks}
    if role == "gateway":
        assert [check.level for check in checks if check.name == "cluster"] == ["warn"] * 3
    assert needs_of(config).num_files > 1024


def test_a_checkpoint_that_cannot_be_served(tmp_path: Path) -> None:
    config = load_any(runtime_dir=tmp_path, environ={}, flags={"gateway": {"port": 1}})
    broken = replace(config, model_dir=ROOT / "configs" / "models" / "mimo-v2.5")
    (check, *_) = check_settings(broken)
    assert (check.level, "no weights" in check.message, "\n" in check.message) == ("fail", True, False)


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    (held / "x").write_bytes(b"0" * 8192)
    (tmp_path / "file").touch()
    environ = {"MIMO_CACHE_DIR": str(held), "MIMO_KV_STORE_DIR": str(tmp_path / "file" / "below")}
    cache, kv = check_caches(environ)
    assert (cache.level, "8.0 KiB held" in cache.message) == ("ok", True)
    assert (kv.level, "MIMO_KV_STORE_DIR" in kv.fix) == ("warn", True)
    assert [entry.name for entry in held.iterdir()] == ["x"]


def test_what_killed_servers_left(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    for name in ("mimo-dead", "mimo-alive"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "supervisor.lock").touch()
    shm.mkdir()
    (shm / "mimo-dead-arena").write_bytes(b"0" * 4096)
    with (tmp_path / "mimo-alive" / "supervisor.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check = check_stale(tmp_path, shm)
    assert check.level == "warn"
    assert "1 have left 4.0 KiB of shared memory: mimo-dead" in check.message
    assert "mimo-alive" not in check.message + check.fix
    assert (tmp_path / "mimo-dead" / "supervisor.lock").exists()
    assert check_stale(tmp_path / "shm", shm).level == "ok"


def doctor(tmp_path: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", "doctor", *words],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path), "NO_COLOR": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_says_it_all_and_leaves_nothing(tmp_path: Path) -> None:
    started_s = time.monotonic()
    done = doctor(tmp_path, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert report["level"] != "fail"
    assert {check["section"] for check in report["checks"]} == {"deployment", "machine", "software", "media", "storage"}
    assert not list(tmp_path.iterdir())
    # 2.5 s of one quiet core.
    assert time.monotonic() - started_s < 30


def test_a_failure_is_exit_code_1_and_readable(tmp_path: Path) -> None:
    done = doctor(tmp_path, MIMO_ENGINE__PAGE_SIZE="0")
    assert done.returncode == 1
    assert "fail  settings" in done.stdout
    assert "engine.page_size is 0" in done.stdout
    assert "->" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.rstrip().endswith("1 failure")
