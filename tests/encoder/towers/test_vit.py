"""Properties of the vision tower that no golden case shows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.config import SinkForm, VisionConfig
from encoder.towers.vit import VisionTower, band_attention, merge_order_coordinates

WINDOW = 4


def small_config(**changes: object) -> VisionConfig:
    values: dict[str, object] = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "out_hidden_size": 24,
        "window_patches": WINDOW,
        "block_types": (-1, 0, 1, 0),
    }
    return VisionConfig(**(values | changes))  # type: ignore[arg-type]


def small_tower(seed: int = 0, *, sinks: bool = True, **changes: object) -> VisionTower:
    tower = VisionTower(small_config(**changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    tower.init_weights(generator)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, parameter in tower.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0.0, 2.0, generator=generator).mul_(float(sinks))
    return tower


def pixels(num_patches: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_patches, 1536, generator=torch.Generator().manual_seed(seed))


def dense_band(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, form: SinkForm) -> torch.Tensor:
    """Slow truth: one score per pair, written out."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        for i in range(q.shape[2]):
            low, high = max(0, i - WINDOW), min(q.shape[2], i + WINDOW + 1)
            scores = (q[:, head, i : i + 1] * k[:, head, low:high]).sum(-1) * q.shape[-1] ** -0.5
            if form == "key0" and low == 0:
                scores = torch.cat((scores[:, :1] + sinks[head], scores[:, 1:]), dim=1)
            if form == "denominator":
                scores = torch.cat((scores, sinks[head].expand(scores.shape[0], 1)), dim=1)
            weights = scores.softmax(-1)[:, : high - low]
            out[:, head, i] = (weights[..., None] * v[:, head, low:high]).sum(1)
    return out


@settings(max_examples=25, deadline=None)
@given(
    num_positions=st.integers(1, 70),
    num_slices=st.integers(1, 3),
    form=st.sampled_from(["key0", "denominator"]),
    seed=st.integers(0, 1000),
)
def test_band_equals_written_out_attention(num_positions: int, num_slices: int, form: SinkForm, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(num_slices, heads, num_positions, 8, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator)
    fast = band_attention(q, k, v, window=WINDOW, sinks=sinks, form=form)
    torch.testing.assert_close(fast, dense_band(q, k, v, sinks, form), atol=1e-5, rtol=0)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([2, 4, 8]), st.sampled_from([2, 6, 10])), min_size=1, max_size=4
    )
)
def test_a_batch_equals_single_runs(grids: list[tuple[int, int, int]]) -> None:
    tower = small_tower()
    media = [pixels(t * h * w, seed) for seed, (t, h, w) in enumerate(grids)]
    with torch.inference_mode():
        together = tower(torch.cat(media), grids)
        apart = torch.cat([tower(one, [grid]) for one, grid in zip(media, grids, strict=True)])
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=0)


def test_a_video_equals_its_slices() -> None:
    tower, video = small_tower(), pixels(3 * 8 * 6)
    with torch.inference_mode():
        whole = tower(video, [(3, 8, 6)])
        slices = torch.cat([tower(part, [(1, 8, 6)]) for part in torch.split(video, 48)])
    torch.testing.assert_close(whole, slices, atol=1e-5, rtol=0)


def test_a_column_block_is_a_row_block_of_the_transposed_grid() -> None:
    """Units transposed, each patch keeping its inner place; sinks are zero because key 0 is the same patch in both."""
    height, width = 8, 12
    columns = small_tower(sinks=False, depth=1, block_types=(1,))
    rows = small_tower(sinks=False, depth=1, block_types=(0,))
    video = pixels(height * width)
    by_unit = video.reshape(height // 2, width // 2, 4, 1536)
    transposed = by_unit.transpose(0, 1).reshape(-1, 1536)
    block, other = columns.blocks[0], rows.blocks[0]
    grid_coordinates = merge_order_coordinates(height, width, torch.device("cpu"))
    assert grid_coordinates.tolist()[:5] == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]
    with torch.inference_mode():
        groups = columns._groups([(1, height, width)], torch.device("cpu"))
        x = columns.patch_embed(transposed)
        in_columns = block(x, groups, by_columns=True)
        # The row block is given the tables of the column order: coordinates are carried along.
        carried = [type(g)(g.num_slices, g.height, g.width, g.rotary_columns, g.rotary_columns) for g in groups]
        in_rows = other(x, carried, by_columns=False)
        whole = columns(video, [(1, height, width)])
        units = columns.merger(in_columns).reshape(width // 2, height // 2, -1).transpose(0, 1).reshape(whole.shape)
    torch.testing.assert_close(in_columns, in_rows)
    torch.testing.assert_close(whole, units, atol=1e-5, rtol=0)


def test_gradients_reach_every_parameter_and_are_finite() -> None:
    for form in ("key0", "denominator"):
        tower = small_tower(sink_form=form)
        tower(pixels(2 * 96 + 4), [(2, 8, 12), (1, 2, 2)]).square().sum().backward()
        for name, parameter in tower.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().sum() > 0, name


def test_grids_and_rows_must_agree() -> None:
    import pytest

    tower = small_tower()
    for wrong in ([], [(1, 3, 4)], [(0, 2, 2)], [(1, 4, 4)]):
        with pytest.raises(ValueError, match="grid"):
            tower(pixels(8), wrong)
