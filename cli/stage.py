"""One process of the pipeline: `python -m cli.stage encoder --name encoder-0 --settings FILE`.

Started by the supervisor, which writes FILE; the stage and its name stand on the command line so that `ps` shows them.
"""

import argparse
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cli.cluster import ClusterConfig, cluster_keys
from cli.logs import LOG_FORMATS, log_to_stderr
from cli.orphan import follow_parent
from encoder import FrontConfig, SglangConfig
from encoder.cluster import ClusterKeys
from encoder.config import EncoderConfig
from encoder.tracing import exporting
from epd.config import EngineConfig, GatewayConfig

_PR_SET_PDEATHSIG = 1
EXIT_USAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderStage:
    """An encoder process: its knobs, the model it loads and the address it binds.

    `arena` names its shared memory: the one the deployment made for all its encoders or, where it is not shared, the
    beginning of the name of one that the process makes for itself.
    """

    config: EncoderConfig
    model_dir: Path
    name: str
    address: str
    arena: str
    arena_is_shared: bool = False
    cluster: ClusterConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStage:
    """A prefill or decode process. Other workers reach it where `cluster` advertises it, else at `address`."""

    config: EngineConfig
    address: str
    cluster: ClusterConfig | None = None

    @property
    def name(self) -> str:
        return self.config.name


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStage:
    config: GatewayConfig
    name: str = "gateway"
    cluster: ClusterConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontStage:
    """The HTTP side of encoders that serve by themselves."""

    config: FrontConfig
    sglang: SglangConfig
    name: str = "front"


Stage = EncoderStage | WorkerStage | GatewayStage | FrontStage
_STAGES: dict[str, type[Any]] = {
    "encoder": EncoderStage,
    "prefill": WorkerStage,
    "decode": WorkerStage,
    "gateway": GatewayStage,
    "front": FrontStage,
}

# Those that are stopped before the ones they need.
HEADS = ("gateway", "front")


def stage_kind(stage: Stage) -> str:
    """encoder, prefill, decode, gateway or front; a worker that does both prompts and tokens is shown as prefill."""
    match stage:
        case EncoderStage():
            return "encoder"
        case GatewayStage():
            return "gateway"
        case FrontStage():
            return "front"
        case WorkerStage():
            return "decode" if stage.config.role == "decode" else "prefill"


def _path_out(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _path_in(kind: type[Any], value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind.__name__)


def write_settings(stage: Stage, path: Path) -> None:
    """Settings may hold API keys: the file is readable by its owner only."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(stage, enc_hook=_path_out))


def read_settings(kind: str, path: Path) -> Stage:
    stage: Stage = msgspec.json.decode(path.read_bytes(), type=_STAGES[kind], dec_hook=_path_in)
    return stage


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux for SIGTERM when the parent dies, so that no child outlives it; covers a parent already gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the supervisor died before this stage started")


@contextmanager
def _importing() -> Iterator[None]:
    """No garbage collection while modules are imported, which takes a fifth less time so; nor of them ever after: a
    full collection that looks at all of torch stops a process for a tenth of a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run(stage: Stage) -> None:
    """Run one stage until it is told to stop. Each import stays here: only its own stage loads torch."""
    match stage:
        case EncoderStage():
            with _importing():
                from encoder import run_encoder

            run_encoder(
                stage.config,
                model_dir=stage.model_dir,
                name=stage.name,
                address=stage.address,
                arena=stage.arena,
                shared=stage.arena_is_shared,
                keys=_keys(stage.cluster),
            )
        case WorkerStage():
            with _importing():
                from epd import run_worker

            advertise = None if stage.cluster is None else stage.cluster.advertise
            run_worker(stage.config, address=stage.address, advertise=advertise, keys=_keys(stage.cluster))
        case GatewayStage():
            with _importing():
                from epd import run_gateway

            run_gateway(stage.config, keys=_keys(stage.cluster))
        case FrontStage():
            with _importing():
                from encoder import run_front

            run_front(stage.config, stage.sglang)


def _keys(cluster: ClusterConfig | None) -> ClusterKeys | None:
    """Read again, so that they are in no file of settings."""
    return None if cluster is None else cluster_keys(cluster)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=sorted(_STAGES))
    parser.add_argument("--name", required=True)
    parser.add_argument("--settings", required=True, type=Path)
    parser.add_argument("--parent", required=True, type=int, help="pid of the supervisor")
    parser.add_argument("--drain-s", default=15.0, type=float, help="how long it may serve on when that was killed")
    parser.add_argument("--log-format", default="text", choices=LOG_FORMATS)
    arguments = parser.parse_args()
    is_head, directory = arguments.stage in HEADS, arguments.settings.parent
    if is_head:
        die_with_parent(arguments.parent)
    follow_parent(arguments.parent, is_head=is_head, directory=directory, drain_s=arguments.drain_s)
    log_to_stderr(arguments.name, arguments.log_format)
    settings = read_settings(arguments.stage, arguments.settings)
    with exporting(arguments.stage, arguments.name):
        run(settings)


if __name__ == "__main__":
    main()
