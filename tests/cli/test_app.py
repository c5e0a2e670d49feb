"""The `mimo` command before any subcommand has begun."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_INTERRUPTED = """
import sys

class Impatient:
    def find_spec(self, name, path, target=None):
        if name == "cli.serve":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Impatient())
from cli.app import main
"""


def test_an_interruption_of_the_imports_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
