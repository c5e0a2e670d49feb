"""The log of a process that serves: one format in every mode."""

import logging
import sys


def log_to_stderr(name: str) -> None:
    """Show what this process, called `name` in a deployment, logs from INFO on."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
