"""Runs towers on decoded media: forward, write the rows of each job where its medium wants them.

Embeddings are compared byte for byte (they decide prefix-cache reuse, and `mimo encode` must give what a server
gives), but a matrix product may round differently with its number of rows: on the CPU, packing several media into one
fp32 pass changed last bits in measurements. So every job of a batch runs by itself, in passes that depend on nothing
but the medium: a video's temporal slices in runs of a fixed number of patches, a sound's segments one by one. A medium
may come in parts, each a job of its own: a part is whole passes, so that the rows are the same however it is cut.
The number of threads also matters and is fixed per process. What the batch still saves is queueing: all forwards are
issued before the first result is copied out, so a GPU does not wait for the host in between; and pictures that come as
pixels are resized and cut together.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from encoder.batcher import Lane
from encoder.cache.arena import checksum
from encoder.config import EncoderConfig
from encoder.errors import TowerFailed
from encoder.towers.weights import Towers, load_towers
from preprocess.device import patches_on
from preprocess.types import MediaKey, MediaLayout, MediaPart, MelFrames, Modality, Patches, Pixels

logger = logging.getLogger(__name__)

# Patches of one vision pass, and of one part of a video. A constant, not a setting: it decides which slices of a video
# share a matrix product.
PASS_PATCHES = 16_384


@dataclass(slots=True, eq=False)
class MediumRows:
    """Where the rows of one medium go: `[num_rows, width]` bytes, filled by its jobs in any order."""

    key: MediaKey
    layout: MediaLayout
    destination: memoryview
    checksum: int | None = None
    """Of all bytes, once the last row is written."""
    num_missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_missing = self.layout.num_rows


@dataclass(frozen=True, slots=True)
class Sound:
    """The whole sound of a medium, and which of its rows are kept: (start, length) each; none given, all are."""

    mel: MelFrames
    slices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class TowerJob:
    """A run of rows of one medium, and what the tower makes them of."""

    rows: MediumRows
    source: Patches | Pixels | Sound
    first_row: int
    num_rows: int

    @classmethod
    def of_part(cls, rows: MediumRows, part: MediaPart) -> "TowerJob":
        """The rows of a part's pictures. The part must begin where a pass begins."""
        t, h, w = part.pictures.grid_thw
        rows_per_pair = MediaLayout(Modality.IMAGE, grid_thw=(1, h, w)).num_vision_tokens
        return cls(rows, part.pictures, part.first_pair * rows_per_pair, t * rows_per_pair)

    @classmethod
    def of_sound(cls, rows: MediumRows, mel: MelFrames) -> "TowerJob":
        """The rows of a medium's sound, which come after those of its pictures."""
        layout = rows.layout
        return cls(rows, Sound(mel, layout.audio_slices), layout.num_vision_tokens, layout.num_audio_rows)

    @property
    def lane(self) -> Lane:
        return Lane.AUDIO if isinstance(self.source, Sound) else Lane.VISION

    @property
    def cost(self) -> int:
        """Patches or mel frames."""
        if isinstance(self.source, Sound):
            return int(self.source.mel.log_mel.shape[0])
        t, h, w = self.source.grid_thw
        return t * h * w

    @property
    def size_bytes(self) -> int:
        """Host memory that the job holds."""
        match self.source:
            case Patches():
                return self.source.pixel_values.nbytes
            case Pixels():
                return sum({id(frame): frame.nbytes for frame in self.source.frames}.values())
            case Sound():
                return self.source.mel.log_mel.nbytes


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

    async def run(self, jobs: Sequence[TowerJob]) -> list[TowerFailed | None]:
        """Encode a batch: per job None, or why this one failed. The last job of a medium sets its rows' checksum."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, jobs)

    def run_sync(self, jobs: Sequence[TowerJob]) -> list[TowerFailed | None]:
        """`run` for callers without an event loop."""
        return self._thread.submit(self._run, jobs).result()

    def close(self) -> None:
        """Wait for a running batch and end the thread."""
        self._thread.shutdown(wait=True)

    def _run(self, jobs: Sequence[TowerJob]) -> list[TowerFailed | None]:
        with torch.inference_mode():
            patches = self._cut(jobs)
            # Each tensor of patches goes as soon as it has been used.
            computed = [self._guarded_rows(job, patches.pop(0)) for job in jobs]
            return [self._write(rows, job) for rows, job in zip(computed, jobs, strict=True)]

    def _cut(self, jobs: Sequence[TowerJob]) -> list[Tensor | None]:
        """For each job that has pixels, its patches; those of the batch are made together."""
        pixels = [job.source for job in jobs if isinstance(job.source, Pixels)]
        if not pixels:
            return [None] * len(jobs)
        try:
            made = iter(patches_on(pixels, self._device))
        except Exception:
            # One may have failed for the others' size, or for a fault of one: `_guarded_rows` tries each by itself.
            logger.exception("preprocessing %d media together failed", len(pixels))
            return [None] * len(jobs)
        return [next(made) if isinstance(job.source, Pixels) else None for job in jobs]

    def _guarded_rows(self, job: TowerJob, patches: Tensor | None) -> Tensor | TowerFailed:
        try:
            rows = self._rows(job, patches)
        except Exception as error:
            logger.exception("the tower failed on %s", job.rows.key)
            return TowerFailed(f"the tower failed: {error}")
        expected = (job.num_rows, self.width)
        if tuple(rows.shape) != expected:
            return TowerFailed(f"the tower made {list(rows.shape)} rows, the layout says {list(expected)}")
        if job.first_row + job.num_rows > job.rows.layout.num_rows:
            return TowerFailed(f"the tower made rows past the {job.rows.layout.num_rows} of the layout")
        return rows

    def _rows(self, job: TowerJob, patches: Tensor | None) -> Tensor:
        source = job.source
        match source:
            case Sound():
                sound = self._audio_rows(source.mel)
                slices = [sound[start : start + length] for start, length in source.slices]
                return torch.cat(slices) if slices else sound
            case Patches():
                # torch.tensor copies into aligned memory; kernels may round differently for another alignment.
                return self._vision_rows(lambda rows: torch.tensor(source.pixel_values[rows]), source.grid_thw)
            case Pixels():
                pixels = patches if patches is not None else patches_on([source], self._device)[0]
                return self._vision_rows(lambda rows: pixels[rows], source.grid_thw)

    def _vision_rows(self, patches: Callable[[slice], Tensor], grid_thw: tuple[int, int, int]) -> Tensor:
        """`patches` gives those of a pass."""
        assert self._towers.vision is not None, "admission refuses modalities without a tower"
        t, h, w = grid_thw
        pairs_per_pass = max(1, PASS_PATCHES // (h * w))
        parts = []
        for start in range(0, t, pairs_per_pass):
            stop = min(t, start + pairs_per_pass)
            pixels = patches(slice(start * h * w, stop * h * w)).to(self._device)
            parts.append(self._towers.vision(pixels, [(stop - start, h, w)]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _audio_rows(self, mel: MelFrames) -> Tensor:
        tokenizer, encoder = self._towers.audio_tokenizer, self._towers.audio_encoder
        if tokenizer is None or encoder is None:
            raise ValueError("the checkpoint has no audio tower")
        codes = tokenizer.encode(torch.tensor(mel.log_mel).to(self._device))
        rows: Tensor = encoder([codes])
        return rows

    def _write(self, computed: Tensor | TowerFailed, job: TowerJob) -> TowerFailed | None:
        if isinstance(computed, TowerFailed):
            return computed
        rows, start, size_bytes = job.rows, job.first_row * self.row_bytes, job.num_rows * self.row_bytes
        if size_bytes:
            target = torch.frombuffer(rows.destination[start : start + size_bytes], dtype=self._torch_dtype)
            target.view(computed.shape).copy_(computed)
        rows.num_missing -= job.num_rows
        if rows.num_missing == 0:
            rows.checksum = checksum(rows.destination)
        return None


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
