"""The arrows between packages, checked on the syntax tree: `TYPE_CHECKING` and in-function imports count.

cli -> epd -> encoder -> preprocess          never up, never sideways; cli/eval.py alone knows training
inside epd: gateway -> router -> transport -> types; engine -> {cache -> kv, model -> kernels, transport} -> types
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("preprocess", "encoder", "epd", "cli")
# What a package shows to those above it.
OUTWARD = (
    *("types", "errors", "config", "client", "wire", "fingerprint", "checkpoint", "parting", "cluster"),
    *("connections", "metrics", "tracing", "tracing_web", "histogram", "footprint"),
)
LIBRARY = "preprocess"  # a library: every module of it is public

EPD_MAY_IMPORT = {
    "gateway": {"router", "transport"},
    "router": {"transport"},
    "transport": set(),
    "engine": {"cache", "kv", "model", "kernels", "transport"},
    "cache": {"kv"},
    "kv": {"kernels"},
    "model": {"kernels"},
    "kernels": set(),
}
EPD_FLOOR = {"types", "errors", "config", "gateway_config", "setting_checks", "store_address", "token_table"}


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def module_of(dotted: str) -> str:
    """`epd.types.Role` -> `epd.types`: the longest prefix that is a module or a package of ours."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        if base.with_suffix(".py").exists() or (base / "__init__.py").exists():
            return ".".join(parts[:end])
    return parts[0]


def test_packages_import_downwards_only() -> None:
    faults = []
    for package in ORDER:
        for path in python_files(package):
            for line, dotted in imported_modules(path):
                target = dotted.split(".")[0]
                if target in ORDER and ORDER.index(target) > ORDER.index(package):
                    faults.append(f"{path.relative_to(ROOT)}:{line}: {package} imports {dotted}")
    assert not faults, "\n".join(faults)


def test_across_packages_only_the_outward_modules() -> None:
    faults = []
    for package in ORDER:
        for path in python_files(package):
            for line, dotted in imported_modules(path):
                target = module_of(dotted)
                root = target.split(".")[0]
                if root not in ORDER or root in (package, LIBRARY):
                    continue
                rest = target.split(".")[1:]
                if rest and (len(rest) > 1 or rest[0] not in OUTWARD):
                    faults.append(f"{path.relative_to(ROOT)}:{line}: {dotted} is internal to {root}")
    assert not faults, "\n".join(faults)


def test_layers_inside_epd() -> None:
    faults = []
    for path in python_files("epd"):
        parts = path.relative_to(ROOT / "epd").parts
        if len(parts) == 1 or parts[0] == "builtin":
            continue
        layer = parts[0]
        assert layer in EPD_MAY_IMPORT, f"epd/{layer} has no place in the layering"
        for line, dotted in imported_modules(path):
            target = module_of(dotted).split(".")
            if target[0] != "epd" or len(target) == 1 or target[1] == layer or target[1] in EPD_FLOOR:
                continue
            if target[1] not in EPD_MAY_IMPORT[layer]:
                faults.append(f"{path.relative_to(ROOT)}:{line}: {layer} imports {dotted}")
    assert not faults, "\n".join(faults)


def test_only_the_evaluation_imports_training_and_only_what_is_light() -> None:
    """The built-in model's tasks are asked by `mimo eval`; nothing that serves knows how a model is trained."""
    faults = []
    for package in ORDER:
        for path in python_files(package):
            for line, dotted in imported_modules(path):
                if dotted.split(".")[0] != "training":
                    continue
                allowed = path.relative_to(ROOT).as_posix() == "cli/eval.py"
                if not allowed or not dotted.startswith(("training.files.", "training.tasks.")):
                    faults.append(f"{path.relative_to(ROOT)}:{line}: {dotted}")
    assert not faults, "\n".join(faults)


def test_no_module_is_a_grab_bag() -> None:
    names = {"utils.py", "helpers.py", "common.py", "misc.py"}
    found = [str(path) for package in ORDER for path in python_files(package) if path.name in names]
    assert not found


@pytest.mark.parametrize(
    "module",
    [
        "preprocess",
        "encoder.types",
        "encoder.wire",
        "encoder.metrics",
        "encoder.front.process",
        "epd.types",
        "epd.gateway.app",
        "cli.app",
        "cli.stage",
        "training.files",
    ],
)
def test_light_modules_do_not_load_torch(module: str) -> None:
    """The gateway, the wire and the command line start without paying for torch."""
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"{module} loads torch"
