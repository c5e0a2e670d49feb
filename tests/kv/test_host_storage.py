"""Host pages: where a page's bytes are, and what a store sees of them."""

import pytest
import torch

from epd.kernels.base import AttentionSpec
from epd.kv.host_storage import HostStorage, PagePart
from epd.kv.layout import KvLayout


def spec(index: int, window_left: int | None, num_kv_heads: int) -> AttentionSpec:
    return AttentionSpec(index, window_left, num_heads=8, num_kv_heads=num_kv_heads, qk_dim=6, v_dim=4, scale=1.0)


LAYOUT = KvLayout.from_specs([spec(0, None, 1), spec(3, None, 1)], [spec(1, 7, 2), spec(2, 7, 3)], 4, 2)


def make_host(num_full: int = 5, num_window: int = 3) -> HostStorage:
    return HostStorage(LAYOUT, num_full_pages=num_full, num_window_pages=num_window)


def test_a_page_is_its_layers_side_by_side_keys_first() -> None:
    host = make_host()
    # Of four tokens and a head, keys take 4 * 6 * 2 bytes and values 4 * 4 * 2.
    assert host.parts(0) == ("full", PagePart(0, 48), PagePart(48, 32))
    assert host.parts(3) == ("full", PagePart(80, 48), PagePart(128, 32))
    assert host.parts(1) == ("window", PagePart(0, 96), PagePart(96, 64))
    assert host.parts(2) == ("window", PagePart(160, 144), PagePart(304, 96))
    assert host.pool("full").shape == (5, LAYOUT.full_page_bytes) == (5, 160)
    assert host.pool("window").shape == (3, LAYOUT.window_page_bytes) == (3, 400)
    assert host.size_bytes == 5 * 160 + 3 * 400
    assert not host.is_pinned


@pytest.mark.parametrize(("kind", "layers"), [("full", (0, 3)), ("window", (1, 2))])
def test_page_and_layer_are_views_of_the_same_bytes(kind: str, layers: tuple[int, int]) -> None:
    host = make_host()
    host.pool(kind).zero_()  # type: ignore[arg-type]
    for layer in layers:
        keys, values = host.layer_views(layer)
        keys[1], values[1] = 10 + layer, 20 + layer
    page = host.page_view(kind, 1)  # type: ignore[arg-type]
    assert page.contiguous
    assert page.nbytes == host.pool(kind).shape[1]  # type: ignore[arg-type]
    expected = b"".join(
        bytes([value]) * part.size_bytes
        for layer in layers
        for value, part in zip((10 + layer, 20 + layer), host.parts(layer)[1:], strict=True)
    )
    assert bytes(page) == expected
    page[:] = bytes(reversed(expected))
    assert bytes(host.layer_views(layers[0])[0][1].tolist()) == bytes(reversed(expected))[: host.parts(layers[0])[1][1]]
    for other in (0, 2):
        assert not any(host.page_view(kind, other))  # type: ignore[arg-type]


def test_what_is_not_there_is_refused() -> None:
    host = make_host()
    for page in (-1, 5):
        with pytest.raises(IndexError, match=rf"full page {page} is outside \[0, 5\)"):
            host.page_view("full", page)
    with pytest.raises(ValueError, match="layer_index is 4; allowed: 0, 1, 2, 3"):
        host.layer_views(4)
    with pytest.raises(ValueError, match="num_window_pages is -1"):
        make_host(num_window=-1)


def test_a_pool_may_be_empty() -> None:
    host = make_host(num_window=0)
    assert host.pool("window").shape == (0, 400)
    assert host.layer_views(1)[0].shape == (0, 96)


def test_torch_sees_what_a_page_holds() -> None:
    """Typed: the keys of one layer in one page, [P, K, H]."""
    host = make_host()
    rows = torch.randn(4, 2, 6).bfloat16()
    host.layer_views(1)[0][2] = rows.view(torch.uint8).flatten()
    start, size = host.parts(1)[1]
    seen = torch.frombuffer(host.page_view("window", 2), dtype=torch.bfloat16)[start // 2 : (start + size) // 2]
    assert torch.equal(seen.view(4, 2, 6), rows)
