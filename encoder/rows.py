"""The rows of a published embedding as a frame, for readers that cannot map the arena."""

import time

from encoder.cache.store import EmbeddingStore
from encoder.errors import ArenaLocked, EmbeddingLost, EncoderBusy
from encoder.failures import failure_of
from encoder.types import EmbeddingRef, EncodeFailure, FetchRows, Rows
from encoder.wire import TensorFrame

# The lease for the time of copying; it is released at once and would end by itself after this long.
_COPY_LEASE_S = 60.0


def frame_of(store: EmbeddingStore, ref: EmbeddingRef) -> TensorFrame:
    """A copy of the rows, `[num_rows, width]`, of a reference that this process has just leased."""
    return TensorFrame(ref.dtype, (ref.num_rows, ref.width), store.leased_content(ref))


def rows_of(
    store: EmbeddingStore, request: FetchRows, *, asker: str
) -> tuple[Rows | EncodeFailure, tuple[TensorFrame, ...]]:
    """The answer and its tensors; a failure when the store no longer has the value that the reference names.

    Raises ArenaLocked, with nothing done.
    """
    try:
        ref = store.lease(request.key, owner=asker, expires_s=time.time() + _COPY_LEASE_S)
    except KeyError:
        return _gone(request), ()
    except ArenaLocked:
        raise
    except EncoderBusy as error:
        return failure_of(request.request_id, error), ()
    try:
        if ref.checksum != request.checksum:
            return _gone(request), ()
        return Rows(request_id=request.request_id), (frame_of(store, ref),)
    finally:
        store.release(ref.lease_id)


def _gone(request: FetchRows) -> EncodeFailure:
    return failure_of(request.request_id, EmbeddingLost(f"the rows of {request.key} are gone from the encoder"))
