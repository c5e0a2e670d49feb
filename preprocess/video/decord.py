"""Frames by decord 0.6: selectable, checked, and refused where it cannot be checked.

decord's own ways of choosing frames are wrong on many files: it numbers key frames in the order of the file, so that
where pictures lead a key frame (HEVC and H.264 with open groups, MPEG-4 with B-frames) every jump lands some frames
late, and its time stamps are read from a table by number and say nothing about the picture. So it is never let jump:
within a group of pictures frames are passed over, and the step across a key frame decodes the next one. It numbers
frames rightly that way if it decodes all of them, which it must: it is held to our count and times, and one frame that
it could not decode, for which it would repeat another, is an error. Cost: a whole pass of decoding, and one conversion
per group.

Refused, with the reason: all but MP4 and Matroska, AV1, edit lists, damage, mirrored or transparent pictures, several
video streams, Matroska of a few frames (for which it has no times) or without a length. A picture that changes its size
on the way comes scaled to the first one's.
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import MediaUnsupported
from preprocess.video.guests import Guest
from preprocess.video.scan import MAX_CODEC_THREADS, Emit

# The share of frames decord may replace by others; 0 would mean any.
_NO_REPLACEMENTS: Final = 1e-9
# It computes times in single precision.
_MAX_TIME_ERROR_S: Final = 1e-3
_MAX_TIME_ERROR: Final = 1e-6
_BATCH: Final = 64
"""Frames passed over between two looks at the deadline."""


def decode_with_decord(
    guest: Guest | str,
    wanted: Sequence[tuple[int, int]],
    emit: Emit,
    *,
    num_threads: int,
    check_deadline: Callable[[], None],
) -> None:
    """Emits the frames `wanted`, (place, frame number) pairs with both ascending.

    `guest` may be the reason why there is none. Raises MediaUnsupported, and what `emit` or `check_deadline` raises.
    """
    if isinstance(guest, str):
        raise _refusal(guest)
    if guest.num_video_streams > 1:
        raise _refusal(f"it has {guest.num_video_streams} video streams, of which decord cannot be told one")
    if guest.is_av1:
        raise _refusal("decord has no decoder for AV1")
    # It does not wait for a decoder of VP9 that has several threads and takes no more packets for now.
    num_threads = 1 if guest.codec == "vp9" else min(num_threads, MAX_CODEC_THREADS)
    walk = _Walk(guest, num_threads, check_deadline)
    first = walk.frame(0)
    if not guest.look.resembles(first):
        raise _refusal("decord shows the first frame differently")
    for place, number in wanted:
        emit(place, first if number == 0 else walk.frame(number))
    # Only a pass that ends with the last frame has numbered the others rightly.
    walk.to_end()


def _refusal(reason: str) -> MediaUnsupported:
    return MediaUnsupported(
        f"the video cannot be decoded by decord, this server's decoder: {reason}; send it as MP4 with H.264",
        hint="video_backend 'pyav' decodes what 'decord' refuses",
    )


class _Walk:
    """From the first frame to the last, each decoded, none jumped over."""

    def __init__(self, guest: Guest, num_threads: int, check_deadline: Callable[[], None]) -> None:
        try:
            import decord
            from decord._ffi.base import DECORDError, DECORDLimitReachedError
        except (ImportError, OSError) as error:
            raise _refusal("decord cannot be loaded") from error
        self._failures = (DECORDError, DECORDLimitReachedError, RuntimeError, StopIteration)
        self._check_deadline = check_deadline
        self._num_frames = guest.index.num_frames
        self._size = guest.look.size
        self._at = 0
        try:
            self._reader: Any = decord.VideoReader(
                io.BytesIO(guest.content), num_threads=num_threads, fault_tol=_NO_REPLACEMENTS
            )
            num_frames = len(self._reader)
            self._keys = [int(key) for key in self._reader.get_key_indices()]
            times_s = self._reader.get_frame_timestamp(range(num_frames))[:, 0]
        except self._failures as error:
            raise _refusal("decord cannot open it") from error
        if num_frames != self._num_frames:
            raise _refusal(f"decord counts {num_frames} frames, the file has {self._num_frames}")
        expected_s = guest.index.times_s
        if expected_s is None or not np.allclose(
            times_s - times_s[0], expected_s, rtol=_MAX_TIME_ERROR, atol=_MAX_TIME_ERROR_S
        ):
            raise _refusal("decord has other times for its frames")

    def frame(self, number: int) -> NDArray[np.uint8]:
        """[H, W, 3] RGB, upright, of a frame that was not passed yet."""
        self._pass_to(number)
        return self._next(number)

    def to_end(self) -> None:
        """Decodes what is left."""
        if self._at < self._num_frames:
            self.frame(self._num_frames - 1)

    def _pass_to(self, number: int) -> None:
        while self._at < number:
            self._check_deadline()
            later = bisect.bisect_right(self._keys, self._at)
            key = self._keys[later] if later < len(self._keys) else self._num_frames
            # Passing over a key frame would be a jump.
            num_skipped = min(number, key - 1, self._at + _BATCH) - self._at
            if num_skipped == 0:
                self._next(self._at)
                continue
            try:
                self._reader.skip_frames(num_skipped)
            except self._failures as error:
                raise _refusal(f"decord cannot decode frames up to {number}") from error
            self._at += num_skipped

    def _next(self, number: int) -> NDArray[np.uint8]:
        self._check_deadline()
        try:
            pixels: NDArray[np.uint8] = self._reader.next().asnumpy()
        except self._failures as error:
            raise _refusal(f"decord cannot decode frame {number}") from error
        if pixels.shape[:2] != self._size:
            raise _refusal(f"decord gives frame {number} another size")
        self._at += 1
        return pixels
