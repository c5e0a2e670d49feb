"""Compiles the C++ sources beside this module, once per machine.

They are compiled for the processor they run on, so a library is kept under a name that holds the sources, the compiler
and the processor's features. Their threads are torch's own: a library names no OpenMP runtime and finds the one that
torch has loaded.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-std=c++17", "-march=native", "-fopenmp", "-fPIC")
_COMPILE_TIMEOUT_S = 300.0
# Characters of what a compiler says.
_MAX_SHOWN = 500
_HUGE_PAGE_BYTES = 2 << 20


NO_COMPILER = "there is no C++ compiler (c++, g++ or what CXX names)"
NOT_YET = "not compiled yet: the first start does, which takes half a minute"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def load_library(source: Path) -> ctypes.CDLL | str:
    """The library of a source file, or the reason why there is none. Compiling takes seconds where nobody has."""
    compiler = _compiler()
    if compiler is None:
        return NO_COMPILER
    try:
        return ctypes.CDLL(str(_built(compiler, source)))
    except (OSError, subprocess.SubprocessError) as error:
        return f"the kernel could not be built with {compiler}: {_what_failed(error)}"


def kernel_states() -> dict[str, str | None]:
    """Every source here, by name: None where its library is compiled and loads, else why not. Compiles none of them: of
    one that nobody has needed yet a few lines are, to see that the compiler works. Leaves nothing behind."""
    # Libraries find their OpenMP runtime among what is loaded.
    import torch  # noqa: F401

    states: dict[str, str | None] = {}
    compiler = _compiler()
    for source in sorted(Path(__file__).parent.glob("*.cpp")):
        if compiler is None:
            states[source.stem] = NO_COMPILER
            continue
        try:
            library = _library_path(compiler, source)
            if library.exists():
                ctypes.CDLL(str(library))
                states[source.stem] = None
            else:
                _try_compiler(compiler)
                states[source.stem] = NOT_YET
        except (OSError, subprocess.SubprocessError) as error:
            states[source.stem] = f"the kernel could not be built with {compiler}: {_what_failed(error)}"
    return states


def _try_compiler(compiler: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "probe.cpp"
        source.write_text('#include <vector>\nextern "C" int probe() { return std::vector<int>(3).size(); }\n')
        ctypes.CDLL(str(_compile(compiler, source, Path(scratch))))


def _what_failed(error: OSError | subprocess.SubprocessError) -> str:
    """In one line."""
    if isinstance(error, subprocess.CalledProcessError):
        said = " ".join(str(error.stderr).split())[:_MAX_SHOWN]
        return f"it ended with {error.returncode}{f': {said}' if said else ' and said nothing'}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {error.timeout:g} s"
    return str(error)


def prefer_huge_pages(address: int, size_bytes: int) -> bool:
    """Ask the system to back this memory, which nobody has written to yet, by huge pages; whether it agreed.

    Weights are read once per step, far more of them than any table of pages knows: with huge pages, reading them is up
    to a quarter faster. Only whole huge pages inside the memory are asked for.
    """
    start = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    stop = (address + size_bytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or stop <= start:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, stop - start, advice) == 0)


def _built(compiler: str, source: Path) -> Path:
    """The compiled library, from this user's cache or, where there is no place for one, from a directory of its own."""
    library = _library_path(compiler, source)
    cache_dir = library.parent
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The workers of a deployment start together: one compiles, the others wait for it.
        with (cache_dir / f"{source.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                logger.info("compiling %s for this processor; that is done once and takes half a minute", source.name)
                with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
                    # Renamed into place when whole: who is killed meanwhile leaves nothing that looks whole.
                    _compile(compiler, source, Path(scratch)).rename(library)
        return library
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return _compile(compiler, source, Path(tempfile.mkdtemp(prefix="mimo-epd-")))


def _library_path(compiler: str, source: Path) -> Path:
    """Where the library is once it is compiled."""
    version = _output(compiler, "--version")
    headers = (header.read_text() for header in sorted(source.parent.glob("*.h")))
    identity = "\0".join((source.read_text(), *headers, version, _processor(), *_FLAGS))
    name = f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    chosen, root = os.environ.get("MIMO_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    cache_dir = Path(chosen).expanduser() if chosen else (Path(root) if root else Path.home() / ".cache") / "mimo-epd"
    return cache_dir / name


def _compile(compiler: str, source: Path, directory: Path) -> Path:
    compiled, library = directory / "kernel.o", directory / "kernel.so"
    _output(compiler, *_FLAGS, "-c", str(source), "-o", str(compiled))
    # Without -fopenmp, which would bring a second OpenMP runtime beside torch's.
    _output(compiler, "-shared", str(compiled), "-o", str(library))
    return library


def _output(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    return done.stdout


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
