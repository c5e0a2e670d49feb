"""Against the receiver of the real sglang wheel: its sockets, its allow-list, its aggregation, its prompts."""

import asyncio
import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from encoder.sglang.config import SglangConfig
from encoder.sglang.errors import DialectError
from encoder.sglang.message import Hold, PartId, Writer
from encoder.sglang.post import Post
from preprocess.tokens import MediaTokenIds, expand
from preprocess.types import MediaLayout, MediaSource, Modality
from tests.encoder.sglang.conftest import Encoder, Opener
from tests.fakes.sglang_desk import WIDTH, FakeDesk, layout_of, rows_of, url_of
from tests.fakes.sglang_wheel import TOKEN_IDS, StockServer, WheelUnavailable, wheel_modules

IDS = MediaTokenIds(**TOKEN_IDS)
NUM_RANKS = 2
CAT: dict[str, Any] = {"grid": [1, 4, 6]}
DOG: dict[str, Any] = {"grid": [1, 8, 4], "name": "dog"}
CLOCK: dict[str, Any] = {"grid": [2, 2, 4], "times": [0.0, 61.5]}
SONG: dict[str, Any] = {"rows": 7}
CONCERT: dict[str, Any] = {"grid": [3, 2, 2], "times": [0.0, 2.0, 4.0], "slices": [[0, 12], [12, 5], [17, 2]]}


@dataclass
class Stock:
    """Both kinds of language-only server."""

    scheduler: StockServer
    tokenizer: StockServer


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    try:
        modules = wheel_modules()
    except WheelUnavailable as error:
        pytest.skip(str(error))
    logs = tmp_path_factory.mktemp("stock")
    servers = Stock(
        StockServer(modules, "scheduler", NUM_RANKS, logs / "scheduler.log"),
        StockServer(modules, "tokenizer", 1, logs / "tokenizer.log"),
    )
    try:
        assert servers.scheduler.answer() == "ready"
        assert servers.tokenizer.answer() == "ready"
        yield servers
    finally:
        servers.scheduler.close()
        servers.tokenizer.close()


class Ask:
    """What one request is, for the stock side, and what must come of it."""

    def __init__(self, rid: str, dtype: str = "bfloat16", **more: object) -> None:
        self.body: dict[str, Any] = {"rid": rid, "prompt": "", "images": [], "videos": [], "audios": []} | more
        self.ids: list[int] = []
        self.dtype = dtype
        self._rows: dict[str, list[bytes]] = {}

    def text(self, text: str) -> "Ask":
        self.body["prompt"] += text
        self.ids += [1000 + ord(letter) for letter in text]
        return self

    def medium(self, modality: Modality, spec: dict[str, Any], *, silent: bool = False, **options: object) -> "Ask":
        """With `silent` its sound is not expected."""
        url = url_of(**spec)
        self.body["prompt"] += f"<{modality}>"
        self.body[f"{modality}s"].append({"url": url, **options} if options else url)
        layout = layout_of({name: spec[name] for name in spec if not silent or name != "slices"}, modality)
        # Our own expansion of the prompt, for the same layout.
        self.ids += expand(layout, IDS, lambda label: [1000 + ord(letter) for letter in label]).token_ids
        content = json.dumps(spec).encode()
        rows = rows_of(content, layout.num_rows, WIDTH, self.dtype)
        self._note(modality, layout, rows)
        return self

    def _note(self, modality: Modality, layout: MediaLayout, rows: bytes) -> None:
        row_bytes = len(rows) // layout.num_rows
        if modality is Modality.AUDIO:
            self._rows.setdefault("AUDIO", []).append(rows)
            return
        split = layout.num_vision_tokens * row_bytes
        self._rows.setdefault(modality.name, []).append(rows[:split])
        if layout.num_audio_rows:
            self._rows.setdefault("AUDIO", []).append(rows[split:])

    def image(self, spec: dict[str, Any], **options: object) -> "Ask":
        return self.medium(Modality.IMAGE, spec, **options)

    def video(self, spec: dict[str, Any], *, silent: bool = False) -> "Ask":
        return self.medium(Modality.VIDEO, spec, silent=silent)

    def audio(self, spec: dict[str, Any]) -> "Ask":
        return self.medium(Modality.AUDIO, spec)

    @property
    def answer(self) -> dict[str, object]:
        """What every receiver must make of it."""
        media = {}
        for name, rows in self._rows.items():
            whole = b"".join(rows)
            num_rows = len(whole) // (WIDTH * (2 if self.dtype == "bfloat16" else 4))
            digest = hashlib.sha256(whole).hexdigest()
            media[name] = {"dtype": f"torch.{self.dtype}", "shape": [num_rows, WIDTH], "sha256": digest}
        return {"status": "ok", "input_ids": self.ids, "media": media}


async def schedule(stock: Stock, encoders: list[Encoder], *asks: Ask) -> list[dict[str, Any]]:
    """By request, what the ranks made of it; all ranks agree."""
    ranks = await asyncio.to_thread(
        stock.scheduler.ask, op="requests", urls=[e.url for e in encoders], requests=[ask.body for ask in asks]
    )
    assert len(ranks) == NUM_RANKS
    assert ranks[0] == ranks[1]
    return [ranks[0][ask.body["rid"]] for ask in asks]


async def tokenize(stock: Stock, encoders: list[Encoder], *asks: Ask) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = await asyncio.to_thread(
        stock.tokenizer.ask, op="requests", urls=[e.url for e in encoders], requests=[ask.body for ask in asks]
    )
    return answers


def examples(dtype: str = "bfloat16") -> list[Ask]:
    def ask(rid: str) -> Ask:
        return Ask(rid, dtype)

    return [
        ask("image").text("What is ").image(CAT).text("?"),
        ask("images").image(CAT).image(DOG, detail="high", max_dynamic_patch=6).text(" or ").image(CAT),
        ask("video").text("When? ").video(CLOCK),
        ask("videos").video(CLOCK).video(CLOCK | {"name": "second"}).text("."),
        ask("audio").audio(SONG).text(" and ").audio(SONG | {"rows": 3}),
        ask("sound").text("Who sings? ").video(CONCERT),
        ask("sounds").video(CONCERT).text(" then ").video(CONCERT | {"name": "encore"}),
        ask("some-sound").video(CLOCK).video(CONCERT).video(CLOCK),
        ask("everything").image(CAT).text(" ").video(CLOCK).text(" ").audio(SONG).image(DOG),
    ]


@pytest.mark.parametrize("num_encoders", [1, 2])
async def test_the_schedulers_of_two_ranks_get_every_medium(
    stock: Stock, open_encoder: Opener, num_encoders: int
) -> None:
    """Several encoders: the media of one request are split into parts, in an order of the sender's choice."""
    encoders = [await open_encoder(send_video_sound=True) for _ in range(num_encoders)]
    asks = examples()
    answers = await schedule(stock, encoders, *asks)
    for ask, answer in zip(asks, answers, strict=True):
        assert answer == ask.answer, ask.body["rid"]
    for encoder in encoders:
        await encoder.is_quiet()
        assert encoder.dialect.gauges()["sockets"] == NUM_RANKS


@pytest.mark.parametrize("num_encoders", [1, 3])
async def test_the_tokenizer_gets_every_medium(stock: Stock, open_encoder: Opener, num_encoders: int) -> None:
    encoders = [await open_encoder(FakeDesk(dtype="float32"), send_video_sound=True) for _ in range(num_encoders)]
    asks = examples("float32")
    answers = await tokenize(stock, encoders, *asks)
    for ask, answer in zip(asks, answers, strict=True):
        assert answer == ask.answer, ask.body["rid"]
    for encoder in encoders:
        await encoder.is_quiet()


async def test_sound_of_videos_is_refused_by_the_release_itself(stock: Stock, open_encoder: Opener) -> None:
    """The reason for the default of `send_video_sound`, and that videos are served with it."""
    sounding, silent = await open_encoder(send_video_sound=True), await open_encoder()
    (refused,) = await schedule(stock, [sounding], Ask("sound").text("(strict)").video(CONCERT))
    assert refused["status"] == "aborted"
    assert "unexpected embedding modality: audio" in refused["message"]
    ask = Ask("silent").text("(strict)").video(CONCERT, silent=True).audio(SONG).video(CLOCK)
    assert await schedule(stock, [silent], ask) == [ask.answer]
    assert await tokenize(stock, [silent], ask) == [ask.answer]


async def test_many_at_once(stock: Stock, open_encoder: Opener) -> None:
    encoder = await open_encoder()
    asks = [
        Ask(f"n{i}").text(f"{i}: ").image(CAT | {"name": i, "pause_ms": (i * 7) % 30}).video(CLOCK | {"name": i})
        for i in range(40)
    ]
    answers = await schedule(stock, [encoder], *asks)
    assert answers == [ask.answer for ask in asks]
    await encoder.is_quiet()


async def test_ranks_that_register_long_after_the_rows_are_there(stock: Stock, open_encoder: Opener) -> None:
    encoder = await open_encoder()
    ask = Ask("late", late_s=0.4).image(CAT)
    assert await schedule(stock, [encoder], ask) == [ask.answer]
    await encoder.is_quiet()


async def test_ranks_that_register_before_the_rows_are_there(stock: Stock, open_encoder: Opener) -> None:
    encoder = await open_encoder()
    ask = Ask("slow").image(CAT | {"pause_ms": 300})
    assert await schedule(stock, [encoder], ask) == [ask.answer]


@pytest.mark.parametrize("late_s", [0.0, 0.3])
async def test_a_failure_reaches_the_client_with_its_words(stock: Stock, open_encoder: Opener, late_s: float) -> None:
    """Before the ranks have registered, and after; a neighbour is served."""
    encoder = await open_encoder()
    bad = (
        Ask("bad", late_s=late_s).image(CAT).image(CAT | {"fail": "a cat of no format", "pause_ms": 150 - 500 * late_s})
    )
    good = Ask("good").image(DOG)
    failed, served = await schedule(stock, [encoder], bad, good)
    assert failed == {"status": "aborted", "message": "mm_items[1]: a cat of no format", "code": 400}
    assert served == good.answer
    await encoder.is_quiet()


async def test_one_part_of_several_fails(stock: Stock, open_encoder: Opener) -> None:
    # The ranks may take back their word to the part that did not fail; it waits for them as long as this.
    encoders = [await open_encoder(send_timeout_s=2.0), await open_encoder(send_timeout_s=2.0)]
    bad = Ask("bad").image(CAT).image(CAT | {"fail": "no"})
    good = Ask("good").image(CAT).image(DOG)
    failed, served = await schedule(stock, encoders, bad, good)
    assert (failed["status"], failed["code"]) == ("aborted", 400)
    assert served == good.answer
    for encoder in encoders:
        await encoder.is_quiet()


async def test_an_encoder_that_refuses(stock: Stock, open_encoder: Opener) -> None:
    """Statuses as the other side's enumeration has them; its ranks live on."""
    encoder = await open_encoder(FakeDesk(modalities=(Modality.IMAGE,)), max_items=1)
    many = Ask("many").image(CAT).image(DOG)
    film = Ask("film").video(CLOCK)
    crash = Ask("crash").image(CAT | {"crash": "secret"})
    answers = await schedule(stock, [encoder], many, film, crash)
    assert [answer["code"] for answer in answers] == [400, 400, 500]
    assert "secret" not in answers[2]["message"]
    assert await schedule(stock, [encoder], Ask("after").image(CAT)) == [Ask("after").image(CAT).answer]


async def test_a_failure_ends_the_tokenizers_wait(stock: Stock, open_encoder: Opener) -> None:
    encoder = await open_encoder()
    good = Ask("good").image(CAT)
    assert await tokenize(stock, [encoder], Ask("bad").image(CAT | {"fail": "no"}), good) == [
        {"status": "none"},
        good.answer,
    ]
    await encoder.is_quiet()


async def test_content_is_checked_against_its_hash(stock: Stock, open_encoder: Opener) -> None:
    encoder = await open_encoder()
    right = "sha256:" + hashlib.sha256(json.dumps(CAT).encode()).hexdigest()
    wrong = "sha256:" + hashlib.sha256(b"another").hexdigest()
    good = Ask("good", hashes=[right]).image(CAT)
    bad = Ask("bad", hashes=[wrong]).image(CAT)
    served, failed = await schedule(stock, [encoder], good, bad)
    assert served == good.answer
    assert (failed["status"], failed["code"]) == ("aborted", 400)


async def test_base64_without_a_scheme(stock: Stock, open_encoder: Opener) -> None:
    encoder = await open_encoder()
    ask = Ask("bare").image(CAT)
    ask.body["images"] = [base64.b64encode(json.dumps(CAT).encode()).decode()]
    assert await schedule(stock, [encoder], ask) == [ask.answer]


async def test_messages_of_others_change_nothing(stock: Stock, open_encoder: Opener) -> None:
    """Rows, failures and rubbish for requests that are not waiting, at the very ports of the ranks."""
    encoder = await open_encoder()
    ports = await asyncio.to_thread(stock.scheduler.ask, op="ports")
    writer = Writer(SglangConfig())
    post = Post(send_timeout_s=5.0, connect_timeout_s=5.0)
    foreign = PartId("somebody_else_local_part_0", 1, 0, Modality.IMAGE)
    medium = await encoder.desk.encode(_source(CAT), asker=None, deadline_unix_s=0.0)
    frames = [
        writer.data(foreign, [medium]),
        [writer.failure(foreign, DialectError("not for you"))],
        [b"rubbish"],
        [b"cos\nsystem\n(S'false'\ntR."],
    ]
    for port in ports:
        for message in frames:
            await post.push(f"tcp://127.0.0.1:{port}", message, Hold(), is_shared=True)
    ask = Ask("mine").image(DOG)
    assert await schedule(stock, [encoder], ask) == [ask.answer]
    # And again the late rows of a request that has been answered.
    late = PartId("mine_local_part_0", 1, 0, Modality.IMAGE)
    for port in ports:
        await post.push(f"tcp://127.0.0.1:{port}", writer.data(late, [medium]), Hold(), is_shared=True)
    ask = Ask("next").image(CAT)
    assert await schedule(stock, [encoder], ask) == [ask.answer]
    medium.release()
    await post.close()
    await encoder.is_quiet()


async def test_registration_with_the_bootstrap_server(stock: Stock, open_encoder: Opener, unused_tcp_port: int) -> None:
    """It registers once it listens, is found healthy, serves, and takes its leave."""
    await asyncio.to_thread(stock.tokenizer.ask, op="bootstrap", port=unused_tcp_port)
    encoder = await open_encoder(
        register_urls=(f"http://127.0.0.1:{unused_tcp_port}",), advertised_url=None, renew_period_s=0.05
    )

    async def known() -> list[str]:
        urls: list[str] = await asyncio.to_thread(stock.tokenizer.ask, op="urls")
        return [url for url in urls if url.endswith(f":{encoder.port}")]

    while not await known():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    assert len(await known()) == 1
    await encoder.dialect.withdraw()
    assert not await known()


def _source(spec: dict[str, Any]) -> MediaSource:
    return MediaSource(Modality.IMAGE, url_of(**spec))
