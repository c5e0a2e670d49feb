"""Runs towers on prepared media: pack, forward, write the rows of each medium where its job wants them.

Embeddings are compared byte for byte (they decide prefix-cache reuse, and `mimo encode` must give what a server
gives), but a matrix product may round differently with its number of rows: on the CPU, packing several media into one
fp32 pass changed last bits in measurements. So every medium of a batch runs by itself, in passes that depend on
nothing but the medium: a video's temporal slices in runs of a fixed number of patches, a sound's segments one by one.
The number of threads also matters and is fixed per process. What the batch still saves is queueing: all forwards are
issued before the first result is copied out, so a GPU does not wait for the host in between.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from encoder.batcher import Lane
from encoder.cache.arena import checksum
from encoder.config import EncoderConfig
from encoder.errors import TowerFailed
from encoder.towers.weights import Towers, load_towers
from preprocess.types import Modality, Patches, PreparedMedia

logger = logging.getLogger(__name__)

# Patches of one vision pass. A constant, not a setting: it decides which slices of a video share a matrix product.
PASS_PATCHES = 16_384


@dataclass(frozen=True, slots=True, eq=False)
class TowerJob:
    """One medium and where its `[num_rows, width]` bytes go (exactly that many)."""

    prepared: PreparedMedia
    destination: memoryview

    @property
    def lane(self) -> Lane:
        return Lane.AUDIO if self.prepared.patches is None else Lane.VISION

    @property
    def cost(self) -> int:
        """Patches, or mel frames of a medium without pictures."""
        if self.prepared.patches is not None:
            return int(self.prepared.patches.pixel_values.shape[0])
        assert self.prepared.mel is not None, "a prepared medium has patches or mel frames"
        return int(self.prepared.mel.log_mel.shape[0])


class TowerRunner:
    """Owns the towers and the one thread that uses them."""

    def __init__(self, towers: Towers, *, dtype: torch.dtype, device: str = "cpu", num_threads: int = 1) -> None:
        """Raises ValueError for a checkpoint without towers."""
        width = towers.out_hidden_size
        if width is None:
            raise ValueError("the checkpoint has neither a vision nor an audio tower")
        self.width = width
        self.dtype = str(dtype).removeprefix("torch.")
        self.row_bytes = width * dtype.itemsize
        self._torch_dtype = dtype
        self._device = torch.device(device)
        self._towers = towers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        if self._device.type == "cuda":
            # Codes of sounds are an argmax: convolutions with shortened mantissas would choose others than the CPU.
            torch.backends.cudnn.allow_tf32 = False
        num_threads_elsewhere = torch.get_num_threads()
        self._thread.submit(_use_threads, num_threads).result()
        # The setting also becomes the default of threads torch has not met yet: give those back what they had.
        torch.set_num_threads(num_threads_elsewhere)

    @classmethod
    def load(cls, model_dir: Path, config: EncoderConfig) -> "TowerRunner":
        """Load the towers of a checkpoint. Raises CheckpointError, ValueError."""
        dtype: torch.dtype = getattr(torch, config.dtype)
        _require_device(config.device)
        towers = load_towers(model_dir, dtype, config.device)
        return cls(towers, dtype=dtype, device=config.device, num_threads=config.tower_threads)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What the checkpoint's towers can encode."""
        vision = (Modality.IMAGE, Modality.VIDEO) if self._towers.vision is not None else ()
        return (*vision, Modality.AUDIO) if self._towers.audio_encoder is not None else vision

    async def run(self, jobs: Sequence[TowerJob]) -> list[int | TowerFailed]:
        """Encode a batch: per job the checksum of the bytes written, or why this one failed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, jobs)

    def run_sync(self, jobs: Sequence[TowerJob]) -> list[int | TowerFailed]:
        """`run` for callers without an event loop."""
        return self._thread.submit(self._run, jobs).result()

    def close(self) -> None:
        """Wait for a running batch and end the thread."""
        self._thread.shutdown(wait=True)

    def _run(self, jobs: Sequence[TowerJob]) -> list[int | TowerFailed]:
        with torch.inference_mode():
            rows = [self._guarded_rows(job) for job in jobs]
            return [
                computed if isinstance(computed, TowerFailed) else self._write(computed, job.destination)
                for computed, job in zip(rows, jobs, strict=True)
            ]

    def _guarded_rows(self, job: TowerJob) -> Tensor | TowerFailed:
        try:
            rows = self._rows(job.prepared)
        except Exception as error:
            logger.exception("the tower failed on %s", job.prepared.key)
            return TowerFailed(f"the tower failed: {error}")
        expected = (job.prepared.layout.num_rows, self.width)
        if tuple(rows.shape) != expected:
            return TowerFailed(f"the tower made {list(rows.shape)} rows, the layout says {list(expected)}")
        return rows

    def _rows(self, prepared: PreparedMedia) -> Tensor:
        parts = [] if prepared.patches is None else [self._vision_rows(prepared.patches)]
        if prepared.mel is not None:
            sound = self._audio_rows(prepared)
            slices = prepared.layout.audio_slices
            parts += [sound[start : start + length] for start, length in slices] if slices else [sound]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _vision_rows(self, patches: Patches) -> Tensor:
        assert self._towers.vision is not None, "admission refuses modalities without a tower"
        t, h, w = patches.grid_thw
        slices_per_pass = max(1, PASS_PATCHES // (h * w))
        parts = []
        for start in range(0, t, slices_per_pass):
            stop = min(t, start + slices_per_pass)
            # torch.tensor copies into aligned memory; kernels may round differently for another alignment.
            pixels = torch.tensor(patches.pixel_values[start * h * w : stop * h * w]).to(self._device)
            parts.append(self._towers.vision(pixels, [(stop - start, h, w)]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _audio_rows(self, prepared: PreparedMedia) -> Tensor:
        assert prepared.mel is not None
        tokenizer, encoder = self._towers.audio_tokenizer, self._towers.audio_encoder
        if tokenizer is None or encoder is None:
            raise ValueError("the checkpoint has no audio tower")
        codes = tokenizer.encode(torch.tensor(prepared.mel.log_mel).to(self._device))
        rows: Tensor = encoder([codes])
        return rows

    def _write(self, rows: Tensor, destination: memoryview) -> int:
        target = torch.frombuffer(destination, dtype=self._torch_dtype).view(rows.shape)
        target.copy_(rows)
        return checksum(destination)


def _require_device(name: str) -> None:
    """Raise ValueError for a device torch does not have here, before anything is loaded."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"encoder.device is {name!r}; allowed: cpu, cuda, cuda:0, cuda:1, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"encoder.device is {name!r}, torch sees {torch.cuda.device_count()} CUDA devices here")


def _use_threads(num_threads: int) -> None:
    torch.get_num_threads()  # makes this thread known to torch, so that the setting below stays
    torch.set_num_threads(num_threads)
