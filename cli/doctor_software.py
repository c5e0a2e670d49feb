"""Checks of what is installed: Python, torch and CUDA, kernels, dependencies."""

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable
from typing import Final

from cli.doctor_check import Check
from cli.plan_units import gib
from epd import kernel_states

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_SPECIFIER = re.compile(r"(==|>=|<=|<|>|!=)\s*([0-9][0-9A-Za-z.+]*)")
_COMPARE: Final[dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]]] = {
    "==": lambda found, wanted: found == wanted,
    ">=": lambda found, wanted: found >= wanted,
    "<=": lambda found, wanted: found <= wanted,
    "<": lambda found, wanted: found < wanted,
    ">": lambda found, wanted: found > wanted,
    "!=": lambda found, wanted: found != wanted,
}
_PYTHON: Final = (3, 11)


def check_software(*, wants_cuda: bool, on_cpu: bool) -> list[Check]:
    """Loads torch."""
    return [_python(), _torch(wants_cuda=wants_cuda), _kernels(on_cpu=on_cpu), *check_dependencies()]


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _PYTHON:
        return Check("python", "fail", found, "install Python 3.11 or later")
    return Check("python", "ok", f"{found}, {sys.executable}")


def _torch(*, wants_cuda: bool) -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", "fail", f"cannot be loaded: {error}", "pip install the versions of pyproject.toml again")
    built = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
    if not torch.cuda.is_available():
        if wants_cuda:
            fix = "install a torch with CUDA and the driver (nvidia-smi must work), or set engine.device=cpu"
            return Check("torch", "fail", f"{built}; the settings ask for cuda, and there is no device", fix)
        return Check("torch", "ok", f"{built}; no CUDA device, stages run on the CPU")
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(f"{properties.name} ({properties.major}.{properties.minor}), {gib(free)} free of {gib(total)}")
    return Check("torch", "ok", f"{built}, driver {_driver()}; {'; '.join(devices)}")


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.readline())
    except OSError:
        found = None
    return found[0] if found else "unknown"


def _kernels(*, on_cpu: bool) -> Check:
    states = kernel_states()
    reasons = {reason for reason in states.values() if reason is not None}
    ready = [name for name, reason in states.items() if reason is None]
    if not reasons:
        return Check("kernels", "ok", f"compiled for this processor: {', '.join(ready)}")
    pending = [name for name, reason in states.items() if reason is not None and reason.startswith("not compiled yet")]
    if len(pending) == len(states) - len(ready):
        said = f"{', '.join(pending)}: not compiled yet; the compiler works, the first start takes half a minute"
        return Check("kernels", "ok", said)
    fix = "apt-get install g++, or name a compiler in CXX; until then slower kernels in plain torch are used"
    return Check("kernels", "warn" if on_cpu else "ok", "; ".join(sorted(reasons)), fix if on_cpu else "")


def check_dependencies(requirements: Iterable[str] | None = None) -> list[Check]:
    """Ours against what is installed; extras are named where they are there."""
    if requirements is None:
        try:
            requirements = importlib.metadata.requires("mimo-epd") or []
        except importlib.metadata.PackageNotFoundError:
            return [Check("dependencies", "warn", "mimo-epd is not installed as a package", "pip install -e .")]
    faults, extras, num_fine = [], [], 0
    for requirement in requirements:
        parsed = _REQUIREMENT.match(requirement)
        if parsed is None:
            continue
        name, wanted, marker = parsed[1], parsed[2].strip(), parsed[3] or ""
        found = installed_version(name)
        if "extra" in marker:
            if found is not None and not re.search(r"""extra\s*==\s*['"](test)['"]""", marker):
                extras.append(f"{name} {found}")
            continue
        if found is None:
            faults.append(f"{name} is not installed")
        elif not satisfies(found, wanted):
            faults.append(f"{name} is {found}, wanted is {wanted}")
        else:
            num_fine += 1
    more = [Check("extras", "ok", ", ".join(sorted(set(extras))))] if extras else []
    if faults:
        return [Check("dependencies", "fail", "; ".join(faults), "pip install -e . (or pip install mimo-epd)"), *more]
    return [Check("dependencies", "ok", f"{num_fine} installed as pyproject.toml asks"), *more]


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfies(found: str, wanted: str) -> bool:
    """`2.14.1+cpu` satisfies `==2.14.1`; numbers alone are compared."""
    for operator, version in _SPECIFIER.findall(wanted):
        left, right = _numbers(found), _numbers(version)
        width = max(len(left), len(right))
        if not _COMPARE[operator](left + (0,) * (width - len(left)), right + (0,) * (width - len(right))):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[+a-zA-Z]", version)[0]))
