"""Errors of the encoder stage. Media faults keep their own class, `preprocess.errors.MediaError`."""


class EncoderError(Exception):
    """Base of what can go wrong between a caller and an encoder; `status` is the HTTP status it maps to."""

    status = 500
    code = "encoder_error"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class EncoderBusy(EncoderError):
    """The encoder's queue is full; nothing was started."""

    status = 503
    code = "encoder_busy"


class ArenaLocked(EncoderBusy):
    """Another process keeps the index of the embedding arena locked; nothing was changed. Trying again helps."""

    code = "arena_locked"


class EncoderUnavailable(EncoderError):
    """No replica answered, after the retry."""

    status = 503
    code = "encoder_unavailable"


class EncodeDeadline(EncoderError):
    """The deadline passed before the embedding was ready."""

    status = 504
    code = "deadline_exceeded"


class ArenaFull(EncoderError):
    """Leases left no room for an embedding of `needed_bytes`; `status` tells the client to come back."""

    status = 503
    code = "embedding_cache_full"

    def __init__(self, message: str, *, retry_after_s: float | None = None, needed_bytes: int | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.needed_bytes = needed_bytes


class EmbeddingLost(EncoderError):
    """A reference no longer leads to the bytes it named (the encoder restarted, or the checksum differs)."""

    status = 503
    code = "embedding_lost"


class EmbeddingUnknown(EncoderError):
    """A key came without content, and no encoder that was asked has its embedding. Sending the content helps."""

    status = 404
    code = "unknown_media"


class WireError(EncoderError):
    """Frames that are not a message of this protocol version."""

    status = 400
    code = "wire_error"


class EmbeddingTooLarge(EncoderError):
    """One medium's embedding, or those of one request, would not fit an empty arena."""

    status = 413
    code = "embedding_too_large"


class ArenaUnavailable(EncoderError):
    """The host has no room for the shared-memory segment; the process cannot start."""

    code = "arena_unavailable"


class KeyMismatch(EncoderError):
    """The sender's key is not the key this encoder computes: it was made for other weights or other settings."""

    status = 503
    code = "key_mismatch"


class DuplicateRequest(EncoderError):
    """A request with this id is being served to the same peer."""

    status = 409
    code = "duplicate_request"


class EncodeCancelled(EncoderError):
    """The peer took its request back."""

    status = 499
    code = "cancelled"


class TowerFailed(EncoderError):
    """The tower raised on this medium; its batch mates are unaffected."""

    code = "tower_failed"


class ReplicaLost(EncoderError):
    """The connection to a replica broke, or it restarted or fell silent, while it owed a reply."""

    status = 503
    code = "replica_lost"
