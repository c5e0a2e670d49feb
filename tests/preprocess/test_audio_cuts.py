"""Sound files that end early or hold more than one file: what is refused, what is given, and what is said of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from preprocess import (
    DecodeLimits,
    MediaKey,
    MediaOptions,
    MediaTooLarge,
    MediaUndecodable,
    Modality,
    ProcessorConfig,
    prepare,
)
from preprocess.audio import decode_audio
from preprocess.joined import joined_warnings
from preprocess.truncation import num_missing_bytes
from preprocess.video.index import read_index
from tests.fakes.clips import index_first, make_video, sine, sound_file
from tests.fakes.media.sounds import encoded

LIMITS = DecodeLimits()
RATE_HZ = 48_000
Write = Callable[[NDArray[np.float32]], bytes]


def song(tone_hz: float = 440.0) -> NDArray[np.float32]:
    return sine(1.0, rate_hz=RATE_HZ, tone_hz=tone_hz)


def coded(container: str, codec: str) -> Write:
    def write(samples: NDArray[np.float32]) -> bytes:
        content = encoded(samples.astype(np.float64), RATE_HZ, container, codec)
        return index_first(content) if container in ("mp4", "ipod", "mov") else content

    return write


def stored(kind: str) -> Write:
    return lambda samples: sound_file(samples, RATE_HZ, kind=kind)


TABLED = {
    "m4a": coded("ipod", "aac"),
    "alac.m4a": coded("ipod", "alac"),
    "mp4": coded("mp4", "aac"),
    "mov": coded("mov", "pcm_s16le"),
    "mka": coded("matroska", "flac"),
    "webm": coded("webm", "libopus"),
    "avi": coded("avi", "libmp3lame"),
}
DECLARING = {
    **{kind.lower(): stored(kind) for kind in ("WAV", "RF64", "W64", "AIFF", "AU", "CAF", "FLAC")},
    "ogg": coded("ogg", "libopus"),
}


@pytest.mark.parametrize("share", [0.4, 0.9, 0.97])
@pytest.mark.parametrize("kind", TABLED)
def test_what_is_left_of_a_file_with_a_table_is_given(kind: str, share: float) -> None:
    content = TABLED[kind](song())
    whole, warnings = decode_audio(content, LIMITS)
    assert warnings == ()
    cut = content[: int(share * len(content))]
    waveform, warnings = decode_audio(cut, LIMITS)
    # What AVI ends with is its index.
    assert 0.15 < waveform.duration_s <= whole.duration_s - (0.0 if kind == "avi" else 0.005)
    # All but the last packet is what it was.
    num_right = waveform.samples.shape[1] - 4800
    np.testing.assert_allclose(waveform.samples[:, :num_right], whole.samples[:, :num_right], atol=1e-4)
    found = re.search(r"cut short, (\d+) bytes of it are missing", " ".join(warnings))
    assert found is not None
    assert len(content) - len(cut) - 10_000 < int(found[1]) <= len(content) - len(cut)


@pytest.mark.parametrize("kind", ["m4a", "webm"])
def test_the_warning_reaches_the_medium(kind: str, tiny: ProcessorConfig) -> None:
    content = TABLED[kind](song())
    media = prepare(
        content[: len(content) * 9 // 10],
        modality=Modality.AUDIO,
        options=MediaOptions(),
        config=tiny,
        key=MediaKey("0" * 32),
    )
    assert any("cut short" in warning for warning in media.warnings)


def test_a_file_cut_before_its_first_packet_says_so() -> None:
    content = TABLED["m4a"](song())
    start = content.index(b"mdat") + 4
    with pytest.raises(MediaUndecodable, match=r"no decodable audio.*cut short"):
        decode_audio(content[:start], LIMITS)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.97])
@pytest.mark.parametrize("kind", DECLARING)
def test_a_file_shorter_than_it_declares_is_refused(kind: str, share: float) -> None:
    content = DECLARING[kind](song())
    decode_audio(content, LIMITS)
    with pytest.raises(MediaUndecodable, match="truncated audio"):
        decode_audio(content[: int(share * len(content))], LIMITS)


@pytest.mark.parametrize("num_links", [2, 3])
def test_flac_files_that_follow_each_other_are_one_sound(num_links: int) -> None:
    tones = [440.0 * link for link in range(1, num_links + 1)]
    links = [sound_file(song(tone_hz), RATE_HZ, kind="FLAC") for tone_hz in tones]
    waveform, warnings = decode_audio(b"".join(links), LIMITS)
    assert warnings == ()
    alone = [decode_audio(link, LIMITS)[0].samples for link in links]
    np.testing.assert_array_equal(waveform.samples, np.concatenate(alone, axis=1))
    with pytest.raises(MediaUndecodable, match="truncated audio"):
        decode_audio(b"".join(links)[:-500], LIMITS)
    with pytest.raises(MediaUndecodable, match="truncated audio"):
        decode_audio(links[0][:-500] + links[1], LIMITS)


def test_a_signature_in_a_picture_of_a_flac_begins_no_file() -> None:
    content = sound_file(song(), RATE_HZ, kind="FLAC")
    head = 4 + 4 + 34
    block = content[:head] + b"\x02\0\0\x20" + b"abcd" + content[:28] + content[head:]
    np.testing.assert_array_equal(decode_audio(block, LIMITS)[0].samples, decode_audio(content, LIMITS)[0].samples)


def test_no_endless_chain_of_flac_files() -> None:
    content = sound_file(song(), RATE_HZ, kind="FLAC")
    with pytest.raises(MediaTooLarge, match="more than 1000 files"):
        decode_audio(content + content[:42] * 1001, LIMITS)


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\0\x08ftyp" + b"\0\0\0\x08free" * 8_000_000,
        b"caff\0\1\0\0" + (b"free" + bytes(8)) * 8_000_000,
        b"RIFF\xff\xff\xff\x7fWAVE" + b"JUNK\0\0\0\0" * 8_000_000,
        b"FLV\1\1\0\0\0\x09\0\0\0\0" + (b"\x08" + bytes(14)) * 8_000_000,
    ],
    ids=["boxes", "chunks", "riff", "tags"],
)
def test_empty_chunks_are_not_walked_for_long(content: bytes) -> None:
    start_s = time.process_time()
    assert num_missing_bytes(content) == 0
    assert joined_warnings(content) == ()
    assert time.process_time() - start_s < 3


READ_ON = {"mp3": coded("mp3", "libmp3lame"), "aac": coded("adts", "aac"), "webm": TABLED["webm"], "avi": TABLED["avi"]}


@pytest.mark.parametrize("kind", ["wav", "aiff", "au", "caf", "m4a", "mp4", "mov", "flv", "flac", *READ_ON])
def test_no_second_file_is_lost_without_a_word(kind: str) -> None:
    flv = {"flv": lambda samples: encoded(samples.astype(np.float64), 44_100, "flv", "aac")}
    write: Write = {**TABLED, **DECLARING, **READ_ON, **flv}[kind]
    content = write(song())
    once, warnings = decode_audio(content, LIMITS)
    assert warnings == ()
    twice, warnings = decode_audio(content * 2, LIMITS)
    if twice.duration_s < 1.9 * once.duration_s:
        assert any("another file follows" in warning for warning in warnings)
    # What is no file is nothing to warn of.
    assert not any("another file" in warning for warning in decode_audio(content + bytes(2000), LIMITS)[1])


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("mov", "mpeg4"), ("flv", "flv")])
def test_no_second_video_is_lost_without_a_word(container: str, codec: str) -> None:
    content = make_video(20, container=container, codec=codec)
    assert read_index(content, LIMITS, lambda: None).warnings == ()
    (warning,) = read_index(content * 2, LIMITS, lambda: None).warnings
    assert "another file follows" in warning


def test_fragments_are_one_file() -> None:
    content = make_video(40, options={"movflags": "frag_keyframe+empty_moov+default_base_moof"})
    assert read_index(content, LIMITS, lambda: None).warnings == ()
