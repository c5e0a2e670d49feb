"""Media front end: bytes in, model-ready patches and log-mel frames out. Knows nothing of models or sockets.

The names below are light (no torch). The heavy half is reached by submodule: `preprocess.pipeline.prepare`,
`preprocess.pool.DecodePool`, `preprocess.fetch.Fetcher`.
"""

from preprocess.config import DecodeLimits, FetchLimits, ProcessorConfig
from preprocess.errors import (
    MediaDecodeTimeout,
    MediaError,
    MediaForbidden,
    MediaInvalid,
    MediaTooLarge,
    MediaUndecodable,
    MediaUnreachable,
    MediaUnsupported,
)
from preprocess.keys import media_key
from preprocess.tokens import Expansion, MediaTokenIds, Run, expand
from preprocess.types import (
    Frames,
    MediaKey,
    MediaLayout,
    MediaOptions,
    MediaSource,
    MelFrames,
    Modality,
    Patches,
    PreparedMedia,
    Waveform,
)

__all__ = [
    "DecodeLimits",
    "Expansion",
    "FetchLimits",
    "Frames",
    "MediaDecodeTimeout",
    "MediaError",
    "MediaForbidden",
    "MediaInvalid",
    "MediaKey",
    "MediaLayout",
    "MediaOptions",
    "MediaSource",
    "MediaTokenIds",
    "MediaTooLarge",
    "MediaUndecodable",
    "MediaUnreachable",
    "MediaUnsupported",
    "MelFrames",
    "Modality",
    "Patches",
    "PreparedMedia",
    "ProcessorConfig",
    "Run",
    "Waveform",
    "expand",
    "media_key",
]
