"""The two message families on the wire, each with its one codec."""

from encoder.wire import Codec
from epd.types import FromWorker, ToWorker


def to_worker_codec() -> Codec[ToWorker]:
    """What a worker reads: requests of gateways and transfers of prefill workers."""
    return Codec[ToWorker](ToWorker)


def from_worker_codec() -> Codec[FromWorker]:
    """What a gateway reads, and a prefill worker from the decode worker it sent to."""
    return Codec[FromWorker](FromWorker)
