"""Which workers can serve a request together: one of each stage, all of one way to hold KV. Pure looks at workers."""

from collections.abc import Collection, Iterable, Sequence

from epd.router.attempts import Worker
from epd.router.policy import choose_worker
from epd.types import Role


def kv_kind(worker: Worker) -> str:
    """How a ready worker holds KV."""
    return "" if worker.info is None else worker.info.kv_fingerprint


def choose_all(
    workers: Iterable[Worker], roles: Sequence[Role], *, affinity: int, avoid: Collection[str]
) -> tuple[Worker, ...] | None:
    """A worker of each role, all of one way to hold KV; None where that cannot be had now."""
    ready = [worker for worker in workers if worker.ready]
    kinds = [{kv_kind(worker) for worker in ready if worker.role is role} for role in roles]
    common = set.intersection(*kinds) if kinds else set()
    chosen: list[Worker] = []
    for role in roles:
        among = {worker.address: worker for worker in ready if worker.role is role and kv_kind(worker) in common}
        address = choose_worker([worker.load() for worker in among.values()], affinity=affinity, avoid=avoid)
        if address is None:
            return None
        chosen.append(among[address])
        common = {kv_kind(among[address])}
    return tuple(chosen) or None


def what_is_missing(workers: Sequence[Worker], roles: Sequence[Role]) -> str:
    """Why no workers could be chosen, for people."""
    missing = [role for role in roles if not any(worker.ready for worker in workers if worker.role is role)]
    if missing or not roles:
        return f"no worker is ready for: {', '.join(missing) or 'any stage'}"
    return f"no two workers of the stages {' and '.join(roles)} hold KV in the same way"


def has_partners(worker: Worker, workers: Sequence[Worker], roles: Sequence[Role]) -> bool:
    """Whether in every other stage somebody holds KV like this worker, or nobody has said yet how he does."""
    for role in roles:
        infos = [other.info for other in workers if other.role is role and other.info is not None]
        if role is worker.role or not infos or worker.info is None:
            continue
        if all(info.kv_fingerprint != worker.info.kv_fingerprint for info in infos):
            return False
    return True
