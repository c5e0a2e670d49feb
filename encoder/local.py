"""Encoding without a server: the same preparation and the same runner, hence the same bytes, in one call."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from encoder.config import EncoderConfig
from encoder.fingerprint import checkpoint_fingerprint
from encoder.runner import TowerJob, TowerRunner
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaUnsupported
from preprocess.keys import media_key
from preprocess.pipeline import prepare
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality


class LocalEncoder:
    """The towers of one checkpoint for synchronous callers. `threads` replaces `tower_threads` of the config."""

    def __init__(self, model_dir: Path, config: EncoderConfig | None = None, *, threads: int | None = None) -> None:
        """Raises CheckpointError or ValueError for a directory that is not a checkpoint with towers."""
        config = config or EncoderConfig()
        self._config = config if threads is None else replace(config, tower_threads=threads)
        self._processor = ProcessorConfig.from_hf(json.loads((model_dir / "config.json").read_text()))
        self._fingerprint = checkpoint_fingerprint(model_dir)
        self._runner = TowerRunner.load(model_dir, self._config)

    def encode(
        self, content: bytes, modality: Modality, options: MediaOptions | None = None
    ) -> tuple[MediaLayout, NDArray[np.float32], MediaKey]:
        """Layout, rows `[num_rows, width]` (bfloat16 towers widened, which is exact) and key of one medium.

        Raises MediaError for bad media, TowerFailed.
        """
        options = options or MediaOptions()
        if modality not in self._runner.modalities:
            raise MediaUnsupported(f"this model has no tower for {modality}")
        key = media_key(
            content,
            modality=modality,
            options=options,
            processor=self._processor,
            tower_fingerprint=self._fingerprint,
        )
        prepared = prepare(content, modality=modality, options=options, config=self._processor, key=key)
        num_rows = prepared.layout.num_rows
        buffer = bytearray(num_rows * self._runner.row_bytes)
        outcome = self._runner.run_sync([TowerJob(prepared, memoryview(buffer))])[0]
        if isinstance(outcome, Exception):
            raise outcome
        return prepared.layout, _as_float32(buffer, self._runner.dtype).reshape(num_rows, -1), key

    def close(self) -> None:
        """End the tower thread."""
        self._runner.close()


def _as_float32(buffer: bytearray, dtype: str) -> NDArray[np.float32]:
    if dtype == "float32":
        return np.frombuffer(buffer, dtype=np.float32)
    bits = np.frombuffer(buffer, dtype=np.uint16).astype(np.uint32)
    return (bits << 16).view(np.float32)
