"""The answer to `POST /v1/encode`: rows as base64, as numbers, or as one safetensors file, written piece by piece.

Pieces are small because the interpreter's lock is held for each: the thread that answers probes comes in between.
"""

import base64
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from aiohttp import web

from encoder.front.desk import Encoding
from encoder.front.items import EncodingFormat
from encoder.front.problems import Problem

_SAFETENSORS_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16"}
_ALIGNMENT_BYTES: Final = 8
# A multiple of three: base64 of pieces is the piece of the base64.
_PIECE_BYTES: Final = 3 << 18
_PIECE_VALUES: Final = 1 << 14

Result = Encoding | Problem


def describe(result: Encoding) -> dict[str, Any]:
    """What is known of one medium besides its rows."""
    timings = msgspec.to_builtins(result.timings)
    return {
        "key": result.key,
        "modality": result.layout.modality.value,
        "rows": result.num_rows,
        "width": result.width,
        "dtype": result.dtype,
        "grid_thw": result.layout.grid_thw,
        "timestamps_s": result.layout.timestamps_s,
        "num_audio_rows": result.layout.num_audio_rows,
        "cached": result.cached,
        "warnings": result.warnings,
        "timings": {"fetch_s": result.fetch_s, **timings},
    }


def all_failed(problems: Sequence[Problem]) -> web.Response:
    """No item is good: the request fails as the item does that says most about trying again.

    That is the first that is the server's fault, or else the first.
    """
    worst = next((problem for problem in problems if problem.status >= 500), problems[0])
    items = [_failed(index, problem) for index, problem in enumerate(problems)]
    return web.Response(
        body=worst.json_bytes(data=items) if len(problems) > 1 else worst.json_bytes(),
        status=worst.status,
        content_type="application/json",
        headers=worst.headers,
    )


async def write_json(
    response: web.StreamResponse, results: Sequence[Result], *, model: str, encoding_format: EncodingFormat
) -> None:
    """An item's rows are let go as soon as they are written."""
    await response.write(f'{{"object":"list","model":{json.dumps(model)},"data":['.encode())
    for index, result in enumerate(results):
        comma = b"," if index else b""
        if isinstance(result, Problem):
            await response.write(comma + _dumps(_failed(index, result)))
            continue
        head = _dumps({"index": index, "object": "embedding", **describe(result)})
        await response.write(comma + head[:-1] + b',"embedding":')
        async for piece in _as_text(result, encoding_format):
            await response.write(piece)
        await response.write(b"}")
        result.release()
    await response.write(b"]}")


def safetensors_head(results: Sequence[Result], *, model: str) -> tuple[bytes, int]:
    """Everything before the rows, and the size of the whole file.

    Tensors are named by the index of their item; what is known of each, or why it failed, stands as JSON under the same
    name in the metadata.
    """
    tensors: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    offset = 0
    for index, result in enumerate(results):
        if isinstance(result, Problem):
            metadata[str(index)] = json.dumps({"status": result.status, "error": result.error})
            continue
        metadata[str(index)] = json.dumps({"model": model, **describe(result)})
        end = offset + len(result.rows)
        tensors[str(index)] = {
            "dtype": _SAFETENSORS_DTYPES[result.dtype],
            "shape": [result.num_rows, result.width],
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    return len(header).to_bytes(8, "little") + header, 8 + len(header) + offset


async def write_rows(response: web.StreamResponse, results: Sequence[Result]) -> None:
    """The rows of all good items, one after another."""
    for result in results:
        if isinstance(result, Problem):
            continue
        for piece in _pieces(result.rows):
            # A copy: what the socket has not taken yet must not change with the arena.
            await response.write(bytes(piece))
        result.release()


async def _as_text(result: Encoding, encoding_format: EncodingFormat) -> AsyncGenerator[bytes, None]:
    if encoding_format == "base64":
        yield b'"'
        for piece in _pieces(result.rows):
            yield base64.b64encode(piece)
        yield b'"'
        return
    rows_per_piece = max(1, _PIECE_VALUES // result.width)
    row_bytes = len(result.rows) // max(1, result.num_rows)
    yield b"["
    for start in range(0, result.num_rows, rows_per_piece):
        piece = result.rows[start * row_bytes : (start + rows_per_piece) * row_bytes]
        values = _floats(piece, result.dtype).reshape(-1, result.width).tolist()
        yield (b"," if start else b"") + msgspec.json.encode(values)[1:-1]
    yield b"]"


def _floats(raw: memoryview, dtype: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
    if dtype == "float32":
        return np.frombuffer(raw, dtype="<f4")
    return (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


def _pieces(rows: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(rows), _PIECE_BYTES):
        yield rows[start : start + _PIECE_BYTES]


def _failed(index: int, problem: Problem) -> dict[str, Any]:
    return {"index": index, "object": "error", "status": problem.status, "error": problem.error}


def _dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
