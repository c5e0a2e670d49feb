"""Accept headers, by the rules of HTTP."""

import pytest

from encoder.front.accept import wants_safetensors

FILE = "application/x-safetensors"


@pytest.mark.parametrize(
    ("headers", "is_file"),
    [
        ([], False),
        ([""], False),
        (["*/*"], False),
        (["application/*"], False),
        (["text/html"], False),
        (["application/json"], False),
        ([FILE], True),
        (["Application/X-SafeTensors"], True),
        ([f"{FILE}; version=1"], True),
        ([f"{FILE}, */*"], True),
        ([f"*/*, {FILE};q=0"], False),
        ([f"*/*, {FILE}; Q=0.000"], False),
        ([f"{FILE};q=0"], False),
        ([f"{FILE};q=0.1, application/json"], False),
        ([f"{FILE};q=0.1", "application/json"], False),
        ([f"application/json;q=0.1, {FILE};q=0.2"], True),
        ([f"{FILE};q=0.5, */*;q=0.9"], False),
        ([f"{FILE}, application/json"], True),
        (["application/json;q=0, */*"], True),
        ([f"application/*;q=0.9, {FILE};q=0.3"], False),
        ([f"{FILE};q=nonsense, application/json;q=0.1"], False),
        (["application/x-safetensors-other"], False),
        ([f"text/plain, {FILE}-x, ,;"], False),
    ],
)
def test_which_form(headers: list[str], is_file: bool) -> None:
    assert wants_safetensors(headers) is is_file
