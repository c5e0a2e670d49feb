"""KV from a prefill worker to a decode worker: pages to tensors, tensors to pages.

What is sent, and in which order, is the docstring of `KvTransfer`: full layers send every page of the prompt, window
layers only the pages of the live window. A page that is not full is sent whole; nobody reads beyond the prompt.
"""

from collections.abc import Sequence

from encoder.wire import TensorFrame
from epd.engine.plan import DraftTail, HeldTransfer, KvImport, PageTable
from epd.kv.storage import KvStorage, LayerPages
from epd.transport.frames import to_frame, to_tensor
from epd.types import KvTransfer, Usage


class KvMover:
    """Reads and writes transfers in one worker's storage. `fingerprint` names model, KV layout and dtype."""

    def __init__(self, storage: KvStorage, *, fingerprint: str, hidden_size: int, vocab_size: int) -> None:
        self._storage = storage
        self._hidden_size = hidden_size
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._page_size = storage.layout.page_size

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def transfer(
        self,
        table: PageTable,
        *,
        request_id: str,
        incarnation: str,
        num_tokens: int,
        first_token: int,
        first_window_page: int,
        usage: Usage,
        timings: dict[str, float],
        first_token_unix_s: float = 0.0,
        tail: DraftTail | None = None,
    ) -> HeldTransfer:
        """Copy the KV of `num_tokens` tokens out of the pages; the pages may be released afterwards.

        `tail` is what draft heads left after as many tokens, `first_token_unix_s` when the prompt was computed.
        """
        storage = self._storage
        num_pages = -(-num_tokens // self._page_size)
        full_pages = table.full_pages[:num_pages]
        window_pages = table.window_pages[first_window_page - table.window_start : num_pages - table.window_start]
        tensors: list[TensorFrame] = []
        for layers, pages in (
            (storage.full_layer_indices, full_pages),
            (storage.window_layer_indices, window_pages),
        ):
            for layer in layers:
                tensors += [to_frame(tensor) for tensor in storage.read_layer(layer, pages)]
        if tail is not None:
            tensors += [to_frame(tail.embeds), to_frame(tail.hidden)]
        transfer = KvTransfer(
            request_id=request_id,
            incarnation=incarnation,
            num_tokens=num_tokens,
            first_token=first_token,
            page_size=self._page_size,
            num_full_layers=len(storage.full_layer_indices),
            num_window_layers=len(storage.window_layer_indices),
            first_full_page=0,
            num_full_pages=len(full_pages),
            first_window_page=first_window_page,
            num_window_pages=len(window_pages),
            cached_tokens=usage.cached_tokens,
            healed_tokens=usage.healed_tokens,
            host_tokens=usage.host_tokens,
            store_tokens=usage.store_tokens,
            layout_fingerprint=self._fingerprint,
            timings=timings,
            first_token_unix_s=first_token_unix_s,
            draft_token_ids=() if tail is None else tail.guesses,
        )
        return HeldTransfer(transfer, tuple(tensors))

    def refusal(self, held: HeldTransfer, *, max_first_window_page: int) -> str | None:
        """Why the transfer cannot be written here, or None. Looks at every shape, so that writing cannot fail later."""
        transfer, storage = held.transfer, self._storage
        if transfer.layout_fingerprint != self._fingerprint:
            return f"KV layout {transfer.layout_fingerprint} was sent, this worker has {self._fingerprint}"
        num_pages = -(-transfer.num_tokens // self._page_size)
        has_all_pages = (
            transfer.num_tokens > 0
            and transfer.first_full_page == 0
            and transfer.num_full_pages == num_pages
            and 0 <= transfer.first_window_page <= max_first_window_page
            and transfer.first_window_page + transfer.num_window_pages == num_pages
        )
        if not has_all_pages:
            return (
                f"KV of {transfer.num_tokens} tokens needs full pages [0, {num_pages}) and window pages from "
                f"{max_first_window_page} on; sent were {transfer.num_full_pages} full pages from "
                f"{transfer.first_full_page}, {transfer.num_window_pages} window pages from "
                f"{transfer.first_window_page}"
            )
        expected = self._shapes(storage.full_layer_indices, num_pages)
        expected += self._shapes(storage.window_layer_indices, transfer.num_window_pages)
        dtype = str(storage.dtype).removeprefix("torch.")
        kv_tensors = held.tensors[: len(expected)]
        if [(frame.dtype, frame.shape) for frame in kv_tensors] != [(dtype, shape) for shape in expected]:
            return f"{len(held.tensors)} KV tensors do not have the {len(expected)} shapes of this worker's layers"
        return self._tail_refusal(held.tensors[len(expected) :], transfer)

    def _tail_refusal(self, tensors: Sequence[TensorFrame], transfer: KvTransfer) -> str | None:
        """The same of what draft heads left. Without them there is nothing, and nothing was guessed."""
        guesses = transfer.draft_token_ids
        if not tensors and not guesses:
            return None
        num_rows = tensors[0].shape[0] if tensors and tensors[0].shape else 0
        expected = (str(self._storage.dtype).removeprefix("torch."), (num_rows, self._hidden_size))
        are_known = all(0 <= token < self._vocab_size for token in guesses)
        are_rows = [(tensor.dtype, tensor.shape) for tensor in tensors] == [expected, expected]
        if are_known and are_rows and num_rows <= transfer.num_tokens:
            return None
        return (
            f"after the KV of {transfer.num_tokens} tokens came tensors of {[each.shape for each in tensors]} and "
            f"guesses {guesses}: two of [rows, {self._hidden_size}] and ids below {self._vocab_size} are expected"
        )

    def write(self, planned: KvImport) -> None:
        """Fill the table's pages: full pages from `first_full_page` on, windows as far as it has pages."""
        storage, table, transfer = self._storage, planned.pages, planned.held.transfer
        tensors = [to_tensor(frame) for frame in planned.held.tensors]
        num_full, num_window = len(storage.full_layer_indices), len(storage.window_layer_indices)
        pairs = list(zip(tensors[::2], tensors[1::2], strict=True))[: num_full + num_window]
        full_pages = table.full_pages[planned.first_full_page : transfer.num_full_pages]
        for layer, pair in zip(storage.full_layer_indices, pairs[:num_full], strict=True):
            storage.write_layer(layer, full_pages, _from(pair, planned.first_full_page))
        skipped = table.window_start - transfer.first_window_page
        window_pages = table.window_pages[: transfer.num_window_pages - skipped]
        for layer, pair in zip(storage.window_layer_indices, pairs[num_full:], strict=True):
            storage.write_layer(layer, window_pages, _from(pair, skipped))

    def _shapes(self, layers: Sequence[int], num_pages: int) -> list[tuple[int, ...]]:
        tensors = [tensor for layer in layers for tensor in (self._storage.keys(layer), self._storage.values(layer))]
        return [(num_pages, *tensor.shape[1:]) for tensor in tensors]


def draft_tail(held: HeldTransfer) -> DraftTail | None:
    """What draft heads left after the transfer's tokens, with tensors on the CPU; None if the sender has no heads."""
    transfer, frames = held.transfer, tail_frames(held)
    if not frames:
        return None
    embed_RD, hidden_RD = (to_tensor(frame) for frame in frames)
    return DraftTail(transfer.num_tokens, transfer.draft_token_ids, embed_RD, hidden_RD)


def kv_frames(held: HeldTransfer) -> tuple[TensorFrame, ...]:
    """Keys and values of each layer in turn; none once they are staged."""
    return held.tensors[: len(held.tensors) - len(tail_frames(held))]


def tail_frames(held: HeldTransfer) -> tuple[TensorFrame, ...]:
    """What draft heads left."""
    transfer = held.transfer
    num_kv = 0 if held.staged else 2 * (transfer.num_full_layers + transfer.num_window_layers)
    return held.tensors[num_kv:]


def size_bytes(held: HeldTransfer) -> int:
    return sum(frame.data.nbytes for frame in held.tensors)


def _from(pair: LayerPages, first: int) -> LayerPages:
    keys, values = pair
    return keys[first:], values[first:]
