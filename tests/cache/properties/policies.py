"""Which eviction policy a schedule's setting stands for."""

from __future__ import annotations

from epd.cache.victims import VictimPolicy, make_policy
from epd.cache.window import num_window_pages
from tests.cache.properties.schedule import Setting

__all__ = ["policy_of"]


def policy_of(setting: Setting) -> VictimPolicy | None:
    """None is the cache's own default; the others are named, the default once more with healing priced in."""
    if setting.policy % 4 == 0:
        return None
    return make_policy(
        ("marginal", "tail", "lru")[setting.policy % 4 - 1],
        window_pages=num_window_pages(setting.window_tokens, setting.page_size),
        tail_pages=setting.retention.tail_pages,
        page_size=setting.page_size,
        num_window_pages=setting.num_window_pages,
        heal_tokens=2 * setting.window_tokens,
    )
