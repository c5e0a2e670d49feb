"""MediaKey: what makes two prepared media the same. Light: no torch.

A key covers the content bytes, the settings in force for the modality after the request's options were applied, and
the tower's checkpoint. So the same bytes under two URLs share a key, and so do a request that spells out the default
and one that leaves it out, or two that say the same in other words. `use_audio: true` is not the default spelled out:
it fails where the default does without, and must not be answered with the default's result.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import msgspec
import xxhash

from preprocess.config import ProcessorConfig
from preprocess.types import MediaKey, MediaOptions, Modality

# Raised whenever `prepare` starts to compute something else from the same bytes and settings.
_ALGORITHM_VERSION: Final = b"mimo-media-3"


def media_key(
    content: bytes,
    *,
    modality: Modality,
    options: MediaOptions,
    processor: ProcessorConfig,
    tower_fingerprint: str,
) -> MediaKey:
    """128-bit xxh3 over length-prefixed parts, as 32 lowercase hexadecimal digits.

    Raises MediaInvalid when an option passes a configured ceiling.
    """
    digest = xxhash.xxh3_128()
    settings = msgspec.json.encode(_settings(modality, options, processor), order="sorted")
    for part in (_ALGORITHM_VERSION, modality.value.encode(), settings, tower_fingerprint.encode(), content):
        # The length prefix keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return MediaKey(digest.hexdigest())


def _settings(modality: Modality, options: MediaOptions, processor: ProcessorConfig) -> dict[str, object]:
    audio = asdict(processor.audio)
    match modality:
        case Modality.IMAGE:
            return {"image": asdict(processor.image_budget(options))}
        case Modality.VIDEO:
            video = asdict(processor.video_budget(options))
            return {"video": video, "audio": audio, "backend": processor.video_backend}
        case Modality.AUDIO:
            return {"audio": audio}
