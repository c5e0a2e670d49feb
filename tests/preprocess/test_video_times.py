"""Time stamps of frames whose file is wrong about its rate."""

from __future__ import annotations

import struct

import numpy as np

from preprocess import DecodeLimits, MediaOptions, ProcessorConfig
from preprocess.video import OpenVideo, open_video
from tests.fakes.clips import make_video


def opened(content: bytes, config: ProcessorConfig) -> OpenVideo:
    budget = config.video_budget(MediaOptions())
    return open_video(content, budget=budget, limits=DecodeLimits(), backend="pyav", check_deadline=lambda: None)


def with_last_frame_of_no_length(clip: bytes) -> bytes:
    """An MP4 of evenly spaced frames with its index at the end, whose last one is shown for a tick only."""
    table = clip.index(b"stts") - 4
    size, num_entries, num_frames, ticks = struct.unpack_from(">I8xIII", clip, table)
    assert (size, num_entries) == (24, 1)
    entries = struct.pack(">I4sIIIIII", 32, b"stts", 0, 2, num_frames - 1, ticks, 1, 1)
    longer = bytearray(clip[:table] + entries + clip[table + size :])
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        at = clip.rindex(name, 0, table) - 4
        longer[at : at + 4] = struct.pack(">I", struct.unpack_from(">I", clip, at)[0] + 8)
    return bytes(longer)


def test_time_stamps_are_the_frames_own_where_the_rate_is_off(tiny: ProcessorConfig) -> None:
    clip = make_video(31)
    plain, sampled = opened(clip, tiny), opened(with_last_frame_of_no_length(clip), tiny)
    assert plain.index.rate_fps == 10
    assert sampled.index.rate_fps > 10.3
    np.testing.assert_array_equal(sampled.indices, plain.indices)
    np.testing.assert_allclose(sampled.timestamps_s, plain.timestamps_s, atol=1e-4)
    assert abs(sampled.timestamps_s[-1] - 3.0) < 1e-4
