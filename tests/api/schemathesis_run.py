"""The schemathesis command, as anybody would run it against a server."""

import os
import subprocess
import sys
from pathlib import Path

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
    "ignored_auth",
)
"""All but `positive_data_acceptance`: a medium that is not at its URL is refused, however well the URL is written."""


def schemathesis_command(url: str, *arguments: str, num_examples: int) -> list[str]:
    """`num_examples` are those of a usual run, for each operation; a longer one asks new things each time."""
    effort = float(os.environ.get("MIMO_TEST_EFFORT", "1"))
    return [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{url}/openapi.json",
        "--checks",
        ",".join(CHECKS),
        "--max-examples",
        str(max(1, int(num_examples * effort))),
        "--continue-on-failure",
        "--request-timeout",
        "60",
        "--no-color",
        "--warnings",
        "off",
        *(["--generation-deterministic"] if effort <= 1 else ["--generation-database", "none"]),
        *arguments,
    ]


def run_schemathesis(url: str, *arguments: str, num_examples: int, directory: Path) -> subprocess.CompletedProcess[str]:
    command = schemathesis_command(url, *arguments, num_examples=num_examples)
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
