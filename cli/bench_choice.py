"""Which cases of a bench run: those that were named, and of all those that can run here."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.util import find_spec

from cli.bench_case import Case
from cli.load import ConfigError

__all__ = ["chosen_cases", "runnable_cases"]

_WIDTH = 100


def chosen_cases(cases: Sequence[Case], named: Sequence[str], group_name: str) -> list[Case]:
    """The cases of these names, or that begin with them where no case has that very name, with or without the group's
    name in front; all when none is named.

    Raises ConfigError listing the names.
    """
    names = [case.name for case in cases]
    wanted: set[str] = set()
    for name in named:
        spelled = {name, f"{group_name}.{name}"}
        found = spelled & set(names) or {full for full in names if full.startswith(tuple(spelled))}
        if not found or not name:
            listed = textwrap.fill(", ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
            raise ConfigError(
                f"--only names {name!r}; allowed, with or without {group_name}., or how they begin:\n{listed}"
            )
        wanted |= found
    return [case for case in cases if not wanted or case.name in wanted]


def runnable_cases(cases: Sequence[Case], *, are_named: bool, extra: str) -> tuple[list[Case], str | None]:
    """Cases whose packages are here, and a line about the others, None when there are none.

    Raises ConfigError when there are others and the user named what runs, or when nothing is left.
    """
    missing = {case.name: case.needs for case in cases if case.needs is not None and find_spec(case.needs) is None}
    if not missing:
        return list(cases), None
    packages = ", ".join(sorted({package for package in missing.values() if package is not None}))
    words = f"{', '.join(missing)}: not installed, but needed: {packages}; pip install 'mimo-epd[{extra}]'"
    left = [case for case in cases if case.name not in missing]
    if are_named or not left:
        raise ConfigError(words)
    return left, f"left out: {words}"
