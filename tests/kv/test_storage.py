"""The tensors: shapes per layer and pool, and moving pages between two storages."""

from __future__ import annotations

import pytest
import torch

from epd.kernels.base import AttentionSpec
from epd.kv.layout import KvLayout
from epd.kv.storage import KvStorage


def spec(index: int, window_left: int | None, num_kv_heads: int) -> AttentionSpec:
    return AttentionSpec(
        index=index, window_left=window_left, num_heads=8, num_kv_heads=num_kv_heads, qk_dim=6, v_dim=4, scale=1.0
    )


LAYOUT = KvLayout.from_specs([spec(0, None, 1), spec(2, None, 1)], [spec(1, 7, 2), spec(3, 7, 2)], 4, 4)


def storage(num_full: int = 5, num_window: int = 3) -> KvStorage:
    return KvStorage(LAYOUT, num_full_pages=num_full, num_window_pages=num_window, dtype=torch.float32)


def test_shapes_and_bytes() -> None:
    held = storage()
    assert held.keys(0).shape == (5, 4, 1, 6)
    assert held.values(0).shape == (5, 4, 1, 4)
    assert held.keys(3).shape == (3, 4, 2, 6)
    assert held.values(3).shape == (3, 4, 2, 4)
    assert held.size_bytes == 5 * LAYOUT.full_page_bytes + 3 * LAYOUT.window_page_bytes
    for read in (held.keys, held.values):
        with pytest.raises(ValueError, match="layer_index is 4; allowed: 0, 1, 2, 3"):
            read(4)


def test_dtype_must_match_the_layout() -> None:
    with pytest.raises(ValueError, match="2 bytes"):
        KvStorage(LAYOUT, num_full_pages=1, num_window_pages=1, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["num_full_pages", "num_window_pages"])
@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_sizes_that_mean_nothing_are_refused_by_name(name: str, value: int) -> None:
    sizes = {"num_full_pages": 1, "num_window_pages": 1} | {name: value}
    with pytest.raises(ValueError, match=rf"{name} is {value}; allowed: .*0 or more"):
        KvStorage(LAYOUT, dtype=torch.float32, **sizes)


def test_pages_travel_between_storages_of_different_sizes() -> None:
    source, target = storage(5, 3), storage(9, 7)
    generator = torch.Generator().manual_seed(1)
    for index in range(4):
        source.keys(index).copy_(torch.randn(source.keys(index).shape, generator=generator))
        source.values(index).copy_(torch.randn(source.values(index).shape, generator=generator))
    target.keys(0).fill_(7.0)
    moves = ((0, [4, 0, 2], [7, 8, 1]), (2, [4, 0, 2], [7, 8, 1]), (1, [2, 1], [6, 0]))
    for index, ours, theirs in moves:
        data = source.read_layer(index, ours)
        assert all(tensor.is_contiguous() for tensor in data)
        target.write_layer(index, theirs, data)
    for index, ours, theirs in moves:
        assert torch.equal(target.keys(index)[theirs], source.keys(index)[ours])
        assert torch.equal(target.values(index)[theirs], source.values(index)[ours])
    untouched = [page for page in range(9) if page not in (7, 8, 1)]
    assert (target.keys(0)[untouched] == 7.0).all()


def test_reading_copies_and_keys_are_views() -> None:
    held = storage()
    held.keys(0).zero_()
    keys, _ = held.read_layer(0, [1])
    held.keys(0)[1] = 3.0
    assert not keys.any()
    assert (held.read_layer(0, [1])[0] == 3.0).all()


def test_nothing_to_move_is_a_valid_transfer() -> None:
    data = storage().read_layer(0, [])
    assert data[0].shape == (0, 4, 1, 6)
    storage().write_layer(0, [], data)


def test_wrong_shapes_pages_and_layers_are_refused() -> None:
    held = storage()
    keys, values = held.read_layer(0, [0, 1])
    with pytest.raises(ValueError, match="layer 0"):
        held.write_layer(0, [0], (keys, values))
    with pytest.raises(ValueError, match="float64"):
        held.write_layer(0, [0, 1], (keys, values.double()))
    with pytest.raises(IndexError, match=r"\[5\]"):
        held.read_layer(0, [5])
    with pytest.raises(IndexError, match=r"\[-1\]"):
        held.read_layer(0, [-1])
    with pytest.raises(ValueError, match="layer_index is 9"):
        held.write_layer(9, [0, 1], (keys, values))
