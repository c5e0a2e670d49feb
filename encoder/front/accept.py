"""Which form of an answer a client takes, by its Accept header (RFC 9110, section 12.5.1)."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

JSON: Final = "application/json"
SAFETENSORS: Final = "application/x-safetensors"
_WEIGHT: Final = re.compile(r"0(?:\.\d{0,3})?|1(?:\.0{0,3})?")


def wants_safetensors(headers: Iterable[str]) -> bool:
    """Whether the safetensors file is the better answer; `headers` are the values of all Accept headers.

    The more specific range counts, whatever its place: type/subtype, type/*, */*. With equal weights it is the file
    where that is named, and JSON else. A client that takes neither gets JSON, as one does that says nothing.
    """
    weights: dict[str, float] = {}
    for media_range, weight in _ranges(headers):
        weights[media_range] = max(weight, weights.get(media_range, 0.0))
    of_json, of_file = _weight(JSON, weights), _weight(SAFETENSORS, weights)
    return of_file > of_json or (of_file == of_json > 0 and SAFETENSORS in weights)


def _weight(media_type: str, weights: dict[str, float]) -> float:
    family = media_type.partition("/")[0]
    return next((weights[known] for known in (media_type, f"{family}/*", "*/*") if known in weights), 0.0)


def _ranges(headers: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Ranges in small letters, with their weights. What cannot be read is left out."""
    for element in ",".join(headers).split(","):
        media_range, *parameters = (word.strip().lower() for word in element.split(";"))
        named = {name.strip(): value.strip() for name, _, value in (word.partition("=") for word in parameters)}
        weight = named.get("q", "1")
        if media_range and _WEIGHT.fullmatch(weight):
            yield media_range, float(weight)
