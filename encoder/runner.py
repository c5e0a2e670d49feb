"""Runs towers on decoded media: forward, write the rows of each job where its medium wants them.

Embeddings are compared byte for byte (they decide prefix-cache reuse, and `mimo encode` must give what a server
gives), but a matrix product may round differently with its number of rows. So towers compute in tiles of a fixed
number of rows (`encoder.towers.products`): then a medium's rows do not depend on what shares the pass, and media of a
batch are packed into common passes, where small ones no longer pay for half-empty tiles and for every step of the tower
anew. That it is so is tested, and checked once when towers are loaded; should a machine's kernels fail the check, every
medium runs by itself there, which is logged and counted (`num_refused_packing`).

A medium may come in parts, each a job of its own: a part is whole slices, so that the rows are the same however it is
cut. The number of threads also matters and is fixed per process. All forwards of a batch are issued before the first
result is copied out, so a GPU does not wait for the host in between; and pictures that come as pixels are resized and
cut together.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from encoder.batcher import Lane
from encoder.cache.arena import checksum
from encoder.config import EncoderConfig
from encoder.errors import TowerFailed
from encoder.towers.serving import ServingTowers
from encoder.towers.weights import Towers, load_towers
from preprocess.device import patches_on
from preprocess.types import MediaKey, MediaLayout, MediaPart, MelFrames, Modality, Patches, Pixels

logger = logging.getLogger(__name__)

# Patches of one vision pass, and of one part of a video: bounds the memory of a pass.
PASS_PATCHES = 16_384
# Mel frames of one audio pass, unless one sound is longer.
PASS_MEL_FRAMES = 24_000


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

    def __init__(
        self,
        towers: Towers,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        num_threads: int = 1,
        compiled: bool = False,
    ) -> None:
        """Raises ValueError for a checkpoint without towers, and for `compiled` where torch.compile does not work."""
        width = towers.out_hidden_size
        if width is None:
            raise ValueError("the checkpoint has neither a vision nor an audio tower")
        self.width = width
        self.dtype = str(dtype).removeprefix("torch.")
        self.row_bytes = width * dtype.itemsize
        self._torch_dtype = dtype
        self._device = torch.device(device)
        self._towers = ServingTowers(towers, compiled=compiled)
        self.num_passes = 0
        self.num_refused_packing = 0
        """1 where media of a pass would change each other's last bits, so that each runs by itself."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        if self._device.type == "cuda":
            # Codes of sounds are an argmax: convolutions with shortened mantissas would choose others than the CPU.
            torch.backends.cudnn.allow_tf32 = False
        num_threads_elsewhere = torch.get_num_threads()
        self._thread.submit(_use_threads, num_threads).result()
        # The setting also becomes the default of threads torch has not met yet: give those back what they had.
        torch.set_num_threads(num_threads_elsewhere)
        try:
            self._thread.submit(self._check_packing).result()
        except RuntimeError as error:
            self.close()
            if not compiled:
                raise
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"encoder.compile is true, but torch.compile does not work here: {why[0]}") from error

    @classmethod
    def load(cls, model_dir: Path, config: EncoderConfig) -> "TowerRunner":
        """Load the towers of a checkpoint. Raises CheckpointError, ValueError."""
        dtype: torch.dtype = getattr(torch, config.dtype)
        _require_device(config.device)
        towers = load_towers(model_dir, dtype, config.device)
        return cls(
            towers,
            dtype=dtype,
            device=config.device,
            num_threads=config.tower_threads,
            compiled=config.compile,
        )

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What the checkpoint's towers can encode."""
        vision = (Modality.IMAGE, Modality.VIDEO) if self._towers.vision is not None else ()
        return (*vision, Modality.AUDIO) if self._towers.hears else vision

    @property
    def packs(self) -> bool:
        """Whether media share passes."""
        return not self.num_refused_packing

    async def run(self, jobs: Sequence[TowerJob]) -> list[TowerFailed | None]:
        """Encode a batch: per job None, or why this one failed. The last job of a medium sets its rows' checksum."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, jobs)

    def run_sync(self, jobs: Sequence[TowerJob]) -> list[TowerFailed | None]:
        """`run` for callers without an event loop."""
        return self._thread.submit(self._run, jobs).result()

    def close(self) -> None:
        """Wait for a running batch and end the thread."""
        self._thread.shutdown(wait=True)

    def _check_packing(self) -> None:
        with torch.inference_mode():
            if not self._towers.keep_media_apart():
                self.num_refused_packing = 1
                logger.warning("media of one pass change each other's last bits on this machine: each runs by itself")

    def _run(self, jobs: Sequence[TowerJob]) -> list[TowerFailed | None]:
        with torch.inference_mode():
            patches = self._cut(jobs)
            computed: dict[int, Tensor | TowerFailed] = {}
            for pack in self._packs_of(jobs):
                # Each tensor of patches goes as soon as it has been used.
                taken = [patches[index] for index in pack]
                patches = [None if index in pack else tensor for index, tensor in enumerate(patches)]
                computed |= zip(pack, self._rows_of_pack([jobs[index] for index in pack], taken), strict=True)
            return [self._write(computed[index], job) for index, job in enumerate(jobs)]

    def _packs_of(self, jobs: Sequence[TowerJob]) -> Iterator[list[int]]:
        """Which jobs share a pass, by index; a job that is larger than a pass is by itself."""
        limits = {Lane.VISION: PASS_PATCHES, Lane.AUDIO: PASS_MEL_FRAMES}
        for lane, limit in limits.items():
            pack: list[int] = []
            for index, job in enumerate(jobs):
                if job.lane is not lane:
                    continue
                if pack and (not self.packs or sum(jobs[other].cost for other in pack) + job.cost > limit):
                    yield pack
                    pack = []
                pack.append(index)
            if pack:
                yield pack

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

    def _rows_of_pack(self, jobs: Sequence[TowerJob], patches: Sequence[Tensor | None]) -> list[Tensor | TowerFailed]:
        if len(jobs) > 1:
            try:
                return [self._checked(rows, job) for rows, job in zip(self._rows(jobs, patches), jobs, strict=True)]
            except Exception:
                # One may be at fault, or their size together: each gets a pass of its own.
                logger.exception("a pass of %d media failed", len(jobs))
        return [self._guarded_rows(job, tensor) for job, tensor in zip(jobs, patches, strict=True)]

    def _guarded_rows(self, job: TowerJob, patches: Tensor | None) -> Tensor | TowerFailed:
        try:
            return self._checked(self._rows([job], [patches])[0], job)
        except Exception as error:
            logger.exception("the tower failed on %s", job.rows.key)
            return TowerFailed(f"the tower failed: {error}")

    def _checked(self, rows: Tensor, job: TowerJob) -> Tensor | TowerFailed:
        expected = (job.num_rows, self.width)
        if tuple(rows.shape) != expected:
            return TowerFailed(f"the tower made {list(rows.shape)} rows, the layout says {list(expected)}")
        if job.first_row + job.num_rows > job.rows.layout.num_rows:
            return TowerFailed(f"the tower made rows past the {job.rows.layout.num_rows} of the layout")
        return rows

    def _rows(self, jobs: Sequence[TowerJob], patches: Sequence[Tensor | None]) -> list[Tensor]:
        """Of jobs of one lane: several that fit a pass, or one of any size."""
        sounds = [job.source for job in jobs if isinstance(job.source, Sound)]
        if sounds:
            self.num_passes += 1
            made = self._towers.rows_of_sounds([torch.tensor(sound.mel.log_mel).to(self._device) for sound in sounds])
            return [_kept(rows, sound.slices) for rows, sound in zip(made, sounds, strict=True)]
        pictures = [self._patches(job, tensor) for job, tensor in zip(jobs, patches, strict=True)]
        grids = [job.source.grid_thw for job in jobs if not isinstance(job.source, Sound)]
        if len(jobs) > 1:
            self.num_passes += 1
            return self._towers.rows_of_pictures([picture.to(self._device) for picture in pictures], grids)
        return [self._rows_in_passes(pictures[0], grids[0])]

    def _patches(self, job: TowerJob, patches: Tensor | None) -> Tensor:
        match job.source:
            case Patches():
                # torch.tensor copies into aligned memory; kernels may round differently for another alignment.
                return torch.tensor(job.source.pixel_values)
            case Pixels():
                return patches if patches is not None else patches_on([job.source], self._device)[0]
            case Sound():
                raise TypeError("a sound has no patches")

    def _rows_in_passes(self, patches: Tensor, grid_thw: tuple[int, int, int]) -> Tensor:
        t, h, w = grid_thw
        pairs_per_pass = max(1, PASS_PATCHES // max(1, h * w))
        parts = []
        for start in range(0, t, pairs_per_pass):
            stop = min(t, start + pairs_per_pass)
            chosen = patches[start * h * w : stop * h * w] if (start, stop) != (0, t) else patches
            self.num_passes += 1
            parts += self._towers.rows_of_pictures([chosen.to(self._device)], [(stop - start, h, w)])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

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


def _kept(rows: Tensor, slices: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([rows[start : start + length] for start, length in slices]) if slices else rows


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
