"""The embedding arena of a deployment: one for all its encoders on this host, made and unlinked by who starts them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cli.supervisor import StageFailed
from encoder import embedding_arena
from encoder.config import EncoderConfig
from encoder.errors import ArenaUnavailable


def arena_name(runtime_dir: Path) -> str:
    """It begins with the name of the run's directory: what a killed run leaves is swept together with that."""
    return f"{runtime_dir.name}-arena"


@contextmanager
def host_arena(encoders: Sequence[EncoderConfig], runtime_dir: Path) -> Iterator[None]:
    """There is an arena while the block runs, if there are encoders. Enter before they start, leave after they ended.

    Raises StageFailed on a host without enough shared memory.
    """
    if not encoders:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(embedding_arena(encoders[0], arena_name(runtime_dir)))
        except ArenaUnavailable as error:
            raise StageFailed(str(error)) from error
        yield
