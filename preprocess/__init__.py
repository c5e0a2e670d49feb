"""Media front end: bytes in, model-ready patches and log-mel frames out. Knows nothing of models or sockets.

Importing the package is light. `Fetcher` (aiohttp), `open_media`, `prepare` and `DecodePool` (torch, the
decoders) load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from preprocess.config import DecodeLimits, DecodeSettings, FetchLimits, ProcessorConfig
from preprocess.crew import Crew
from preprocess.errors import (
    DecoderCrashed,
    DecoderUnavailable,
    MediaDecodeTimeout,
    MediaError,
    MediaForbidden,
    MediaInvalid,
    MediaTooLarge,
    MediaUndecodable,
    MediaUnreachable,
    MediaUnsupported,
    OptionInvalid,
)
from preprocess.keys import media_key
from preprocess.tokens import Expansion, MediaTokenIds, Run, expand
from preprocess.types import (
    Frames,
    MediaKey,
    MediaLayout,
    MediaOptions,
    MediaPart,
    MediaSource,
    MelFrames,
    Modality,
    Patches,
    Pixels,
    PreparedMedia,
    Waveform,
)

if TYPE_CHECKING:
    from preprocess.device import patches_on
    from preprocess.fetch import Fetcher
    from preprocess.pipeline import LayoutChanged, OpenMedia, open_media, prepare
    from preprocess.pool import DecodePool

__all__ = [
    "Crew",
    "DecodeLimits",
    "DecodePool",
    "DecodeSettings",
    "DecoderCrashed",
    "DecoderUnavailable",
    "Expansion",
    "FetchLimits",
    "Fetcher",
    "Frames",
    "LayoutChanged",
    "MediaDecodeTimeout",
    "MediaError",
    "MediaForbidden",
    "MediaInvalid",
    "MediaKey",
    "MediaLayout",
    "MediaOptions",
    "MediaPart",
    "MediaSource",
    "MediaTokenIds",
    "MediaTooLarge",
    "MediaUndecodable",
    "MediaUnreachable",
    "MediaUnsupported",
    "MelFrames",
    "Modality",
    "OpenMedia",
    "OptionInvalid",
    "Patches",
    "Pixels",
    "PreparedMedia",
    "ProcessorConfig",
    "Run",
    "Waveform",
    "expand",
    "media_key",
    "open_media",
    "patches_on",
    "prepare",
]

_LOADED_ON_USE: Final = {
    "DecodePool": "preprocess.pool",
    "Fetcher": "preprocess.fetch",
    "LayoutChanged": "preprocess.pipeline",
    "OpenMedia": "preprocess.pipeline",
    "open_media": "preprocess.pipeline",
    "patches_on": "preprocess.device",
    "prepare": "preprocess.pipeline",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        return getattr(importlib.import_module(_LOADED_ON_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
