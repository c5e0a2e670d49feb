"""The cost model against counting row by row; the choice against both costs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.cache.prefix import PrefixHit
from epd.engine.heal_cost import HealCost, LayerCost, Resume, heal_cost
from epd.engine.heal_rows import first_rows
from tests.fakes.tiny_text import tiny_config

layer_costs = st.builds(
    LayerCost, reach=st.one_of(st.none(), st.integers(1, 12)), per_token=st.integers(1, 1000), per_key=st.integers(0, 9)
)
costs = st.builds(
    lambda layers, page_size: HealCost(tuple(layers), page_size),
    st.lists(layer_costs, min_size=1, max_size=6),
    st.sampled_from([1, 4, 8]),
)


@settings(max_examples=80, deadline=None)
@given(layer_costs, st.integers(0, 40), st.integers(0, 40))
def test_a_layer_costs_what_its_rows_cost(layer: LayerCost, start: int, more: int) -> None:
    counted = 0
    for row in range(start, start + more):
        num_keys = row + 1 if layer.reach is None else min(row, layer.reach) + 1
        counted += layer.per_token + num_keys * layer.per_key
    assert layer.of(start, start + more) == counted


@settings(max_examples=200, deadline=None)
@given(costs, st.integers(0, 50), st.integers(0, 80))
def test_the_cheaper_way_is_taken(cost: HealCost, usable: int, more: int) -> None:
    page_size = cost.page_size
    hit = PrefixHit(usable * page_size, (usable + more) * page_size)
    found, num_tokens = cost.resume(hit)
    num_missing = hit.num_full_only_tokens - hit.num_tokens
    rows = first_rows(cost.reaches, hit.num_full_only_tokens, page_size=page_size)
    # In tokens of computing afresh, at the mean price of a token of the missing part.
    price = cost.compute(hit.num_tokens, hit.num_full_only_tokens) / num_missing if num_missing else 1.0
    healing = cost.heal(hit.num_full_only_tokens) / price + page_size
    if found.heals:
        assert found == Resume(rows[0], hit.num_full_only_tokens)
        assert healing <= num_tokens < num_missing
        assert num_tokens < healing + 1
    else:
        assert found == Resume(hit.num_tokens, hit.num_tokens)
        assert num_tokens == num_missing
        assert not rows or num_missing <= page_size or healing > num_missing - 1


@given(costs, st.integers(1, 30), st.integers(0, 30), st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_losing_more_windows_never_makes_computing_the_choice(
    cost: HealCost, reach: int, usable: int, fewer: int
) -> None:
    """The less is usable, the dearer is computing; healing costs the same."""
    stop = (usable + reach) * cost.page_size
    less = max(0, usable - fewer) * cost.page_size
    if (
        cost.compute(usable * cost.page_size, stop) > 0
        and cost.resume(PrefixHit(usable * cost.page_size, stop))[0].heals
    ):
        assert cost.heal(stop) < cost.compute(less, stop)


def test_flops_of_a_geometry() -> None:
    """Two FLOPs per weight that a token passes: all but the table, the projection to the vocabulary, idle experts."""
    config = tiny_config()
    cost = heal_cost(config, page_size=16)
    assert cost.reaches == (None, 15, 15, None, 15, 15, 15, None)
    full, window = cost.layers[3], cost.layers[1]
    attention = 192 * (8 * 48 + 2 * 48 + 2 * 32 + 8 * 32)
    assert full.per_token == 2 * (attention + 3 * 192 * 96 * 2 + 192 * 8)
    assert cost.layers[0].per_token == 2 * (attention + 3 * 192 * 384)
    assert window.per_token == full.per_token + 2 * 192 * 2 * (48 + 32)
    assert full.per_key == 2 * 8 * (48 + 32)


def test_a_trapezoid_is_about_half_of_its_rows() -> None:
    """60 of 70 layers are window layers: of the rows that are run, each passes about half of the layers."""
    layer = LayerCost(127, 1000, 1)
    full = LayerCost(None, 1000, 0)
    cost = HealCost((full, *([layer] * 6), *((full, *([layer] * 6)) * 9)), 16)
    stop = 200_000
    start = first_rows(cost.reaches, stop, page_size=16)[0]
    assert 0.48 < cost.heal(stop) / cost.compute(start, stop) < 0.53
    # So healing is worth it when a little more than half of its rows are missing.
    assert cost.resume(PrefixHit(stop - 4160, stop))[0].heals
    assert not cost.resume(PrefixHit(stop - 3600, stop))[0].heals
    assert cost.resume(PrefixHit(0, stop))[1] < 4160
