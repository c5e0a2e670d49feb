"""Decode steps as CUDA graphs: one launch for the trunk's forward instead of a few per layer.

A decode step is one token per sequence, and drafts after it; each of these tokens is a row, with its sequence's pages
for a table. A graph has a shape, rows x pages of a table row, and a step takes the smallest shape it fits in. Rows that
nothing needs compute a token at position 0 of a scratch page of each pool, which nothing else uses. Inputs lie at fixed
addresses, in one buffer that is filled on the host and copied at once. Shapes come from a bounded set and are recorded
when first needed. All other steps, and the draft heads, go the ordinary way.

All but `CudaRecorder` is plain code that runs on any device: with `PlainRecorder` the same padded step is computed
without a graph. Written for CUDA; so far it has run on CPUs alone, which is to say without `CudaRecorder`.

Shape letters: B rows; F, W pages of a row of the full and the window table; D hidden width; V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from epd.engine.plan import SequenceStep
from epd.kernels.base import AttentionBackend
from epd.kernels.cuda_decode import DecodeRow, DecodeTables, StaticDecode, StaticDecodeBackend
from epd.kernels.cuda_experts import static_obstacle
from epd.kernels.cuda_plan import PageTables
from epd.model.hybrid import HybridModel
from epd.model.moe import Moe

logger = logging.getLogger(__name__)

# Widths of the full table, in pages: powers of two between these. Longer sequences go the ordinary way, where reading
# their keys costs far more than launching kernels.
_MIN_TABLE_PAGES, _MAX_TABLE_PAGES = 32, 4096
# Runs before recording, in which kernels are compiled and chosen, and memory is reserved.
_NUM_WARMUPS = 3


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a step computes: embeddings and normed hidden states [B, D], fp32 logits [B, V]. Good until the next run."""

    embed: Tensor
    hidden: Tensor
    logits: Tensor


Compute = Callable[[], Decoded]


class GraphRecorder(Protocol):
    """Turns a computation over tensors at fixed addresses into one that can be run again when they have changed."""

    def record(self, compute: Compute) -> Compute:
        """Return what runs it. The computation itself may be run here any number of times, or not at all.

        Raises RuntimeError when it cannot be recorded.
        """
        ...


class PlainRecorder:
    """Records nothing: to run it is to compute it."""

    def record(self, compute: Compute) -> Compute:
        """See `GraphRecorder`."""
        return compute


class CudaRecorder:
    """CUDA graphs that share one pool of memory, since no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Compute) -> Compute:
        """See `GraphRecorder`. A step may be computed several times: it writes the same keys to the same places."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(_NUM_WARMUPS):
                    compute()
            current.wait_stream(side)
            # Other threads of this process may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                decoded = compute()

        def replay() -> Decoded:
            graph.replay()
            return decoded

        return replay


@dataclass(frozen=True, slots=True)
class ScratchPages:
    """A page of each pool that belongs to nobody."""

    full: int
    window: int


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """The shapes there are: `batch_sizes` x `table_pages`, both rising."""

    batch_sizes: tuple[int, ...]
    table_pages: tuple[int, ...]

    @classmethod
    def up_to(cls, max_rows: int, max_table_pages: int) -> GraphShapes:
        """Powers of two and `max_rows` itself; powers of two of pages up to what the longest sequence needs."""
        batch_sizes = [size for size in _powers(1) if size < max_rows] + [max_rows]
        most = min(max(max_table_pages, _MIN_TABLE_PAGES), _MAX_TABLE_PAGES)
        return cls(tuple(batch_sizes), tuple(size for size in _powers(_MIN_TABLE_PAGES) if size < 2 * most))

    def fit(self, num_rows: int, num_pages: int) -> tuple[int, int] | None:
        """Return the smallest shape for this many rows of at most so many pages, None when there is none."""
        rows = next((size for size in self.batch_sizes if size >= num_rows), None)
        pages = next((size for size in self.table_pages if size >= num_pages), None)
        return None if rows is None or pages is None else (rows, pages)


class DecodeGraphs:
    """The graphs of one worker."""

    def __init__(
        self,
        model: HybridModel,
        backend: StaticDecodeBackend,
        shapes: GraphShapes,
        scratch: ScratchPages,
        recorder: GraphRecorder,
        *,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._backend = backend
        self._shapes = shapes
        self._scratch = scratch
        self._recorder: GraphRecorder | None = recorder
        self._page_size = page_size
        self._device = device
        self._widest = max((layer.window_left or 0 for layer in model.config.layers), default=0)
        self._graphs: dict[tuple[int, int], _Graph] = {}

    @property
    def num_recorded(self) -> int:
        """Shapes recorded so far."""
        return len(self._graphs)

    def run(self, steps: Sequence[SequenceStep]) -> Decoded | None:
        """Compute a decode step; None when these steps are something else, or fit no shape.

        Rows of the result are the tokens of the steps, drafts included, in order; they are overwritten by the next run.
        When recording fails, which is logged, this and all later steps go the ordinary way.
        """
        if self._recorder is None or not all(_is_decode(step) for step in steps):
            return None
        num_rows = sum(step.computed_stop - step.start for step in steps)
        num_pages = max((step.computed_stop - 1) // self._page_size + 1 for step in steps)
        shape = self._shapes.fit(num_rows, num_pages)
        if shape is None:
            return None
        try:
            decoded = self._graph(shape, self._recorder).run(steps)
        except _NotRecorded as error:
            self._recorder = None
            logger.error("CUDA graphs are off from here on: a step of %d rows cannot be recorded: %s", shape[0], error)
            return None
        return Decoded(*(each[:num_rows] for each in (decoded.embed, decoded.hidden, decoded.logits)))

    def _graph(self, shape: tuple[int, int], recorder: GraphRecorder) -> _Graph:
        if shape not in self._graphs:
            inputs = _Inputs(*shape, self._scratch, reach=self._widest, page_size=self._page_size, device=self._device)
            self._graphs[shape] = _Graph(self._model, self._backend.static_decode(inputs.tables), inputs, recorder)
        return self._graphs[shape]


class _NotRecorded(Exception):
    """A shape cannot be recorded; says why."""


class _Graph:
    """One shape: recorded in its first run."""

    def __init__(self, model: HybridModel, attention: StaticDecode, inputs: _Inputs, recorder: GraphRecorder) -> None:
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._recorder = recorder
        self._replay: Compute | None = None

    def run(self, steps: Sequence[SequenceStep]) -> Decoded:
        self._attention.prepare(self._inputs.fill(steps))
        if self._replay is None:
            try:
                self._replay = self._recorder.record(self._compute)
            except RuntimeError as error:
                raise _NotRecorded(" ".join(str(error).split())) from error
        return self._replay()

    def _compute(self) -> Decoded:
        embed_BD = self._model.embed(self._inputs.token_ids)
        hidden_BD = self._model(embed_BD, self._inputs.tables.position, self._attention.context())
        return Decoded(embed_BD, hidden_BD, self._model.logits(hidden_BD))


class _Inputs:
    """Token ids, positions and page tables of one shape, at fixed addresses.

    One buffer on the host, one copy of it on the device: [ids B | positions B | window starts B | full table B x F |
    window table B x W].
    """

    def __init__(
        self, num_rows: int, num_pages: int, scratch: ScratchPages, *, reach: int, page_size: int, device: torch.device
    ) -> None:
        self._scratch, self._reach, self._page_size = scratch, reach, page_size
        num_window_pages = reach // page_size + 2
        sizes = [num_rows] * 3 + [num_rows * num_pages, num_rows * num_window_pages]
        # Pinned, so that the copy does not hold up the host. It is over before the host writes here again: sampling has
        # waited for the step by then.
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        host_parts = [part.numpy() for part in torch.split(self._host, sizes)]
        self._ids, self._positions, self._window_starts = host_parts[:3]
        self._full = host_parts[3].reshape(num_rows, num_pages)
        self._window = host_parts[4].reshape(num_rows, num_window_pages)
        parts = torch.split(self._device, sizes)
        self.token_ids = parts[0]
        pages = PageTables(parts[3].view(num_rows, num_pages), parts[4].view(num_rows, num_window_pages), parts[2])
        self.tables = DecodeTables(pages, position=parts[1])
        # What the rows of the full table hold: between steps few of them change.
        self._held: list[tuple[int, ...]] = [()] * num_rows
        self._full[:], self._window[:] = scratch.full, scratch.window

    def fill(self, steps: Sequence[SequenceStep]) -> list[DecodeRow]:
        """Write the steps, then scratch rows, and bring all of it to the device."""
        rows = [
            self._fill_row(row, step, offset)
            for row, (step, offset) in enumerate(
                (step, offset) for step in steps for offset in range(step.computed_stop - step.start)
            )
        ]
        for row in range(len(rows), len(self._ids)):
            self._ids[row] = self._positions[row] = self._window_starts[row] = 0
            self._put_full(row, (self._scratch.full,))
            self._window[row] = self._scratch.window
            rows.append(DecodeRow(num_tokens=1, window_start_page=0))
        self._device.copy_(self._host, non_blocking=True)
        return rows

    def _fill_row(self, row: int, step: SequenceStep, offset: int) -> DecodeRow:
        """Row of the step's token at `offset`: its own, then its drafts."""
        position, held_from = step.start + offset, step.pages.window_start
        last_page = position // self._page_size
        first_page = max(held_from, (position - self._reach) // self._page_size, 0)
        self._ids[row] = (*step.token_ids, *step.draft.drafts)[offset]
        self._positions[row], self._window_starts[row] = position, first_page
        self._put_full(row, step.pages.full_pages[: last_page + 1])
        held = step.pages.window_pages[first_page - held_from : last_page + 1 - held_from]
        self._window[row] = self._scratch.window
        self._window[row, : len(held)] = held
        return DecodeRow(num_tokens=position + 1, window_start_page=first_page)

    def _put_full(self, row: int, pages: tuple[int, ...]) -> None:
        if self._held[row] != pages:
            self._full[row] = self._scratch.full
            self._full[row, : len(pages)] = np.asarray(pages)
            self._held[row] = pages


def make_graphs(
    model: HybridModel,
    backend: AttentionBackend,
    *,
    max_rows: int,
    max_table_pages: int,
    scratch: ScratchPages,
    page_size: int,
    device: torch.device,
) -> DecodeGraphs | None:
    """The graphs of a worker on a CUDA device, for steps of up to `max_rows` tokens.

    None, with the reason in the log, where decode cannot be recorded.
    """
    reason = graph_obstacle(model, backend, max_rows=max_rows)
    if reason is not None:
        logger.warning("no CUDA graphs for decode: %s", reason)
        return None
    assert isinstance(backend, StaticDecodeBackend)
    shapes = GraphShapes.up_to(max_rows, max_table_pages)
    return DecodeGraphs(model, backend, shapes, scratch, CudaRecorder(device), page_size=page_size, device=device)


def graph_obstacle(model: HybridModel, backend: AttentionBackend, *, max_rows: int) -> str | None:
    """Why decode of this model cannot be recorded, in words for a person; None where it can."""
    if not isinstance(backend, StaticDecodeBackend):
        return f'engine.attention = "{backend.name}" has no decode of fixed shapes'
    for module in model.modules():
        if isinstance(module, Moe):
            if not isinstance(module.gate_up, Tensor) or not isinstance(module.down, Tensor):
                return 'experts are kept quantised (engine.weights = "keep") and are run one by one'
            assert model.config.moe is not None
            num_rows = max_rows * model.config.moe.num_experts_per_token
            return static_obstacle(module.gate_up, module.down, num_rows=num_rows, dtype=model.dtype)
    return None


def _powers(first: int) -> list[int]:
    return [first << shift for shift in range(24)]


def _is_decode(step: SequenceStep) -> bool:
    """Whether the step computes one token and drafts after it, samples after each, and does nothing else."""
    return (
        len(step.token_ids) == 1
        and step.sample is not None
        and not step.heals
        and not step.media
        and not step.draft.ahead
    )
