"""Records vouch for themselves: whole ones come back, anything else is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.cache.arena import checksum
from encoder.tiers.record import RecordDamaged, RecordHeader, pack, unpack
from preprocess.types import MediaKey, MediaLayout, Modality

KEY = MediaKey("0123456789abcdef" * 2)


def record(num_rows: int = 4, width: int = 8, dtype: str = "float32", key: MediaKey = KEY) -> bytes:
    rows = np.arange(num_rows * width * (4 if dtype == "float32" else 2), dtype=np.uint32).astype(np.uint8).tobytes()
    layout = MediaLayout(Modality.AUDIO, num_audio_rows=num_rows)
    header = RecordHeader(
        key=key, layout=layout, width=width, dtype=dtype, checksum=checksum(rows), warnings=("a gap at 3 s",)
    )
    return b"".join(pack(header, rows))


@given(num_rows=st.integers(0, 50), width=st.integers(1, 64), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
def test_what_is_packed_comes_back(num_rows: int, width: int, dtype: str) -> None:
    found = unpack(record(num_rows, width, dtype), KEY)
    assert (found.header.width, found.header.dtype, found.header.layout.num_rows) == (width, dtype, num_rows)
    assert found.header.warnings == ("a gap at 3 s",)
    assert checksum(found.rows) == found.header.checksum
    assert len(found.rows) == num_rows * width * (4 if dtype == "float32" else 2)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_bit_can_flip_unseen(place: int, bit: int) -> None:
    content = bytearray(record())
    content[place % len(content)] ^= 1 << bit
    with pytest.raises(RecordDamaged):
        unpack(bytes(content), KEY)


@given(data=st.data())
def test_no_part_is_a_record(data: st.DataObject) -> None:
    content = record()
    end = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(RecordDamaged):
        unpack(content[:end], KEY)
    with pytest.raises(RecordDamaged):
        unpack(content + b"\0", KEY)


@given(content=st.binary(max_size=200))
def test_foreign_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(RecordDamaged):
        unpack(content, KEY)


def test_a_record_of_another_key_is_refused() -> None:
    other = MediaKey("f" * 32)
    with pytest.raises(RecordDamaged, match="record of ffff"):
        unpack(record(key=other), KEY)


def test_rows_that_do_not_fit_are_not_packed() -> None:
    layout = MediaLayout(Modality.AUDIO, num_audio_rows=2)
    header = RecordHeader(key=KEY, layout=layout, width=4, dtype="float32", checksum=0)
    with pytest.raises(ValueError, match="has 5 bytes of rows, its layout says 32"):
        pack(header, b"12345")
