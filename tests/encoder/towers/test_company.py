"""Media of one pass leave each other alone, to the bit: any company, any order, one thread or two, fp32 and bf16."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encoder.towers import products
from encoder.towers.fast_audio import FastAudioEncoder, FastTokenizer
from encoder.towers.fast_vision import FastVision
from encoder.towers.serving import ServingTowers
from encoder.towers.vit import Grid
from encoder.towers.weights import Towers
from tests.fakes.odd_towers import audio_towers, mel, picture, vision_tower

GRIDS: tuple[Grid, ...] = ((1, 2, 2), (1, 4, 6), (3, 4, 6), (1, 6, 4), (1, 16, 18), (2, 2, 2), (1, 10, 12))
FRAMES = (1, 5, 37, 100, 101, 230, 64)


@pytest.fixture(params=[1, 2], scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=[torch.float32, torch.bfloat16], scope="module")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


companies = st.lists(st.integers(0, 6), min_size=1, max_size=7)


@pytest.mark.parametrize("packed", [True, False])
def test_pictures_in_any_company(threads: int, dtype: torch.dtype, packed: bool) -> None:
    if packed and not products.can_pack(dtype, torch.device("cpu")):
        pytest.skip("oneDNN has no products of this dtype here")
    fast = FastVision(vision_tower(dtype), packed=packed, tile=64)
    media = [picture(grid, seed) for seed, grid in enumerate(GRIDS)]
    with torch.inference_mode():
        alone = [fast([pixels], [grid])[0].clone() for pixels, grid in zip(media, GRIDS, strict=True)]

    @settings(max_examples=12 if threads == 1 else 3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(companies)
    def check(chosen: list[int]) -> None:
        with torch.inference_mode():
            rows = fast([media[index] for index in chosen], [GRIDS[index] for index in chosen])
        for index, made in zip(chosen, rows, strict=True):
            assert torch.equal(made, alone[index])

    check()


@pytest.mark.parametrize("packed", [True, False])
def test_sounds_in_any_company(threads: int, dtype: torch.dtype, packed: bool) -> None:
    if packed and not products.can_pack(dtype, torch.device("cpu")):
        pytest.skip("oneDNN has no products of this dtype here")
    tokenizer, encoder = audio_towers(dtype)
    fast = FastTokenizer(tokenizer, packed=packed, tile=64), FastAudioEncoder(encoder, packed=packed, tile=64)
    media = [mel(frames, seed) for seed, frames in enumerate(FRAMES)]
    with torch.inference_mode():
        alone = [fast[1](fast[0]([one]))[0].clone() for one in media]

    @settings(max_examples=8 if threads == 1 else 3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(companies)
    def check(chosen: list[int]) -> None:
        with torch.inference_mode():
            rows = fast[1](fast[0]([media[index] for index in chosen]))
        for index, made in zip(chosen, rows, strict=True):
            assert torch.equal(made, alone[index])

    check()


@pytest.mark.parametrize("width", [(1280, 192), (96, 192)])
@pytest.mark.parametrize("packed", [True, False])
def test_a_row_has_its_value_at_every_place_of_a_tile(
    threads: int, dtype: torch.dtype, width: tuple[int, int], packed: bool
) -> None:
    if packed and not products.can_pack(dtype, torch.device("cpu")):
        pytest.skip("oneDNN has no products of this dtype here")
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(width[1], width[0], generator=generator), torch.randn(width[1], generator=generator)
    rows = torch.randn(3, width[0], generator=generator).to(dtype)
    with torch.inference_mode():
        linear = products.pack(weight.to(dtype), bias.to(dtype), packed=packed)
        expected: list[torch.Tensor] = []
        # Two threads share a tile: each place of one would take long where they have to wait for each other.
        for place in range(0, products.WIDE_TILE_ROWS - 2, 3 if threads == 1 else 25):
            tile = torch.randn(products.WIDE_TILE_ROWS, width[0], generator=generator).to(dtype)
            tile[place : place + 3] = rows
            other = torch.ones(products.WIDE_TILE_ROWS, width[1], dtype=dtype)
            made = [
                products.product(tile, linear),
                products.product(tile, linear, "swish"),
                products.product(tile, linear, "gelu"),
                products.product_times(tile, linear, other),
                products.product_plus(tile, linear, other),
            ]
            made = [one[place : place + 3] for one in made]
            expected = expected or made
            assert all(torch.equal(one, first) for one, first in zip(made, expected, strict=True)), place


@pytest.mark.parametrize("form", ["key0", "denominator"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("merger_norm", ["layernorm", "rmsnorm"])
def test_pictures_are_those_of_the_definition(form: str, packed: bool, merger_norm: str) -> None:
    tower = vision_tower(sink_form=form, merger_norm=merger_norm)
    fast = FastVision(tower, packed=packed)
    media = [picture(grid, seed) for seed, grid in enumerate(GRIDS)]
    with torch.inference_mode():
        plain = tower(torch.cat(media), GRIDS)
        made = torch.cat(fast(media, GRIDS))
    torch.testing.assert_close(made, plain, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False, "window_right": 3},
        {"causal": False, "window_left": None, "window_right": None},
        {"causal": False, "window_left": None, "window_right": 2},
        {"skip_layer": None, "kernel_size": 5, "pool": 3},
    ],
)
def test_codes_and_rows_are_those_of_the_definition(changes: dict[str, object]) -> None:
    tokenizer, encoder = audio_towers(torch.float32, **changes)
    media = [mel(frames, seed) for seed, frames in enumerate(FRAMES)]
    with torch.inference_mode():
        codes = FastTokenizer(tokenizer)(media)
        for one, made in zip(media, codes, strict=True):
            assert torch.equal(tokenizer.encode(one), made)
        rows = FastAudioEncoder(encoder)(codes)
        torch.testing.assert_close(torch.cat(rows), encoder(codes), atol=2e-4, rtol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    fast = FastVision(vision_tower())
    for pixels, grid in ((picture((1, 2, 2), 0), (1, 4, 4)), (picture((1, 2, 2), 0), (1, 1, 4))):
        with pytest.raises(ValueError, match="grid"):
            fast([picture((1, 2, 2), 0), pixels], [(1, 2, 2), grid])
    tokenizer, encoder = audio_towers()
    with pytest.raises(ValueError, match="mel is"):
        FastTokenizer(tokenizer)([torch.zeros(3, 127)])
    with pytest.raises(ValueError, match="codes are"):
        FastAudioEncoder(encoder)([torch.zeros(3, 2, dtype=torch.long)])


def test_the_check_at_the_start_finds_company_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    towers = ServingTowers(Towers(vision_tower(), *audio_towers()))
    with torch.inference_mode():
        assert towers.keep_media_apart()
        pictures, sounds = towers.rows_of_pictures, towers.rows_of_sounds
        monkeypatch.setattr(towers, "rows_of_pictures", lambda p, g: [x + 1e-6 * (len(g) > 1) for x in pictures(p, g)])
        assert not towers.keep_media_apart()
        monkeypatch.setattr(towers, "rows_of_pictures", pictures)
        monkeypatch.setattr(towers, "rows_of_sounds", lambda mels: [x + 1e-6 * i for i, x in enumerate(sounds(mels))])
        assert not towers.keep_media_apart()


def test_kept_tables_are_few() -> None:
    fast = FastVision(vision_tower())
    with torch.inference_mode():
        for height in range(2, 50, 2):
            fast([picture((1, height, 2), 0)], [(1, height, 2)])
    assert fast._shape.cache_info().currsize == 16
