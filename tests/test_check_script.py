"""The parts of `scripts/check` together run every test, and none twice."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
E2E = "pytest.mark." + "e2e"


@dataclass(frozen=True)
class Part:
    name: str
    taken: tuple[Path, ...]
    ignored: tuple[Path, ...]
    marked: bool | None
    """Only tests marked e2e (True), only the others (False), or both."""

    def takes(self, file: Path, *, marked: bool) -> bool:
        """Whether tests of the file with that mark run here. An ignored folder hides what is named below it too."""
        here = {file, *file.parents}
        return self.marked in (None, marked) and bool(here & set(self.taken)) and not here & set(self.ignored)


@pytest.fixture(scope="module")
def parts() -> list[Part]:
    plan = subprocess.run([ROOT / "scripts" / "check", "--plan"], capture_output=True, text=True, check=True)
    found = []
    for line in plan.stdout.splitlines():
        name, *words = line.split()
        found.append(
            Part(
                name,
                tuple(ROOT / word for word in words if word.startswith("tests")),
                tuple(ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")),
                False if " -m not e2e" in line else True if " -m e2e" in line else None,
            )
        )
    return found


def test_every_test_runs_in_one_part(parts: list[Part]) -> None:
    wrong = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        always = "pytestmark" in text and E2E in text.split("pytestmark", 1)[1].split("\ndef ")[0]
        marks = [True] if always else [False, True] if E2E in text else [False]
        for marked in marks:
            names = [part.name for part in parts if part.takes(file, marked=marked)]
            if len(names) != 1:
                wrong.append(f"{file.relative_to(ROOT)} (e2e: {marked}): {names or 'nowhere'}")
    assert len(parts) == 4
    assert not wrong


def test_the_parts_name_only_what_is_there(parts: list[Part]) -> None:
    missing = {
        str(path.relative_to(ROOT)) for part in parts for path in (*part.taken, *part.ignored) if not path.exists()
    }
    assert not missing
