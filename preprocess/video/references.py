"""Which pictures of an H.264 stream the pictures wanted are made from, known before any is decoded.

A decoder can leave out pictures that nothing refers to; the stream marks those. But pictures that something refers to
are not all needed either: the middle picture of a B-pyramid often serves its two neighbours only. A slice header says
how long its reference lists are and how they are ordered, which is enough to know every picture that it may use.
Following these from the pictures wanted gives all that must be decoded.

A reference picture cannot just be left out: the lists of later pictures would change. A stand-in takes its place, with
the same number and marking, which copies another picture: the stream stays a valid one, only with another content in
pictures that nobody looks at.

Where the analysis does not reach (see `preprocess.video.h264`; gaps in numbering), every reference picture is decoded.

Source: ITU-T H.264 8.2.1 (order counts), 8.2.4 (lists), 8.2.5 (marking).
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from preprocess.video.bitstream import Buffer
from preprocess.video.h264 import I_SLICE, P_SLICE, HeaderReader, Picture, Slice, Sps, Unreadable, stand_in

_MAX_VAIN_PACKETS: Final = 500


def references(pictures: Sequence[Picture], sps: Sps) -> list[frozenset[int]]:
    """Of each picture, the ones it may use; `pictures` are all from a start on, in file order. Raises Unreadable.

    What pictures use that lead the start on the screen is not told: it may lie before the start.
    """
    max_frame_num = 1 << sps.frame_num_bits
    stored: dict[int, tuple[int, int]] = {}
    """Reference frames in the decoder: number in file order to (frame_num, order count), oldest first."""
    orders = _orders(pictures, 1 << sps.order_bits)
    found: list[frozenset[int]] = []
    last_frame_num: int | None = None
    for number, picture in enumerate(pictures):
        if picture.is_idr:
            stored.clear()
        elif last_frame_num is not None and picture.frame_num not in (
            last_frame_num,
            (last_frame_num + 1) % max_frame_num,
        ):
            raise Unreadable("gaps in numbering")
        numbers = {
            other: frame_num - max_frame_num if frame_num > picture.frame_num else frame_num
            for other, (frame_num, _) in stored.items()
        }
        used: set[int] = set()
        for one in picture.slices if picture.is_idr or orders[number] >= orders[0] else ():
            used.update(_used(one, picture.frame_num, orders[number], numbers, stored, max_frame_num))
        found.append(frozenset(used))
        if picture.is_reference:
            last_frame_num = picture.frame_num
            _mark(picture, number, orders[number], numbers, stored, sps.max_references)
    return found


def _orders(pictures: Sequence[Picture], max_lsb: int) -> list[int]:
    """The order count of each picture, which is its rank on the screen."""
    orders: list[int] = []
    high, low = 0, 0
    for picture in pictures:
        if picture.is_idr:
            high, low = 0, 0
        lsb = picture.order_lsb
        this_high = high
        if lsb < low and low - lsb >= max_lsb // 2:
            this_high += max_lsb
        elif lsb > low and lsb - low > max_lsb // 2:
            this_high -= max_lsb
        orders.append(this_high + lsb + min(picture.order_delta or 0, 0))
        if picture.is_reference:
            high, low = this_high, lsb
    return orders


def _used(
    one: Slice,
    frame_num: int,
    order: int,
    numbers: dict[int, int],
    stored: dict[int, tuple[int, int]],
    max_frame_num: int,
) -> set[int]:
    """The pictures in the lists of one slice."""
    if one.kind == I_SLICE:
        return set()
    if one.kind == P_SLICE:
        initial = [sorted(numbers, key=lambda other: -numbers[other])]
    else:
        before = sorted((o for o in stored if stored[o][1] < order), key=lambda o: -stored[o][1])
        after = sorted((o for o in stored if stored[o][1] > order), key=lambda o: stored[o][1])
        initial = [before + after, after + before]
        if len(stored) > 1 and initial[0] == initial[1]:
            initial[1][:2] = initial[1][1::-1]
    used: set[int] = set()
    for which, entries in enumerate(initial):
        used.update(_moved(entries, one.num_active[which], one.moves[which], frame_num, numbers, max_frame_num))
    return used


def _moved(
    entries: list[int],
    num_active: int,
    moves: Sequence[int],
    frame_num: int,
    numbers: dict[int, int],
    max_frame_num: int,
) -> list[int]:
    """A list with the pictures named by `moves` put to its front, one after the other."""
    by_number = {number: picture for picture, number in numbers.items()}
    final = list(entries[:num_active])
    predicted = frame_num
    for place, difference in enumerate(moves):
        predicted = (predicted + difference) % max_frame_num
        number = predicted - max_frame_num if predicted > frame_num else predicted
        if number not in by_number:
            raise Unreadable("a reference that is not there")
        picture = by_number[number]
        final = [*final[:place], picture, *(other for other in final[place:] if other != picture)][:num_active]
    return final


def _mark(
    picture: Picture,
    number: int,
    order: int,
    numbers: dict[int, int],
    stored: dict[int, tuple[int, int]],
    max_references: int,
) -> None:
    """Takes a reference picture into the decoder's store, which lets go of the oldest or of those named."""
    if picture.unmarked:
        by_number = {value: other for other, value in numbers.items()}
        for difference in picture.unmarked:
            stored.pop(by_number.get(picture.frame_num - difference, -1), None)
    elif len(stored) >= max_references:
        del stored[min(numbers, key=lambda other: numbers[other])]
    stored[number] = (picture.frame_num, order)


def needed(used: Sequence[frozenset[int]], targets: AbstractSet[int]) -> set[int]:
    """The targets and all that they are made from, directly or not."""
    found: set[int] = set()
    waiting = list(targets)
    while waiting:
        picture = waiting.pop()
        if picture not in found:
            found.add(picture)
            waiting.extend(used[picture])
    return found


class Shortcut:
    """Tells for the runs of one stream which pictures need not be decoded although others refer to them.

    Gives up for good where the analysis does not cover the stream, or hundreds of packets in a row were needed.
    """

    def __init__(self, extradata: bytes) -> None:
        self._num_vain = 0
        self._headers: HeaderReader | None = None
        try:
            self._headers = HeaderReader(extradata)
        except Unreadable:
            self._num_vain = _MAX_VAIN_PACKETS

    def stand_ins(self, packets: Sequence[tuple[int, Buffer]], targets: AbstractSet[int]) -> dict[int, bytes]:
        """For those of a run's packets (number in file order, content) that the targets do not need: cheap ones.

        Pictures that nothing refers to are not among them; those the decoder can leave out.
        """
        if self._headers is None or self._num_vain >= _MAX_VAIN_PACKETS:
            return {}
        try:
            pictures = [self._headers.read(memoryview(packet)) for _, packet in packets]
            sps = self._headers.parameters()
            used = references(pictures, sps)
        except Unreadable:
            self._num_vain = _MAX_VAIN_PACKETS
            return {}
        places = needed(used, {place for place, (number, _) in enumerate(packets) if number in targets})
        found = {
            packets[place][0]: stand_in(picture, sps, length_bytes=self._headers.length_bytes)
            for place, picture in enumerate(pictures)
            if place and place not in places and picture.is_reference and picture.is_plain and not picture.is_idr
        }
        self._num_vain = 0 if found else self._num_vain + len(packets)
        return found
