"""A desk whose embeddings are known beforehand, and that counts its leases: for the SGLang dialect without a tower."""

import asyncio
import base64
import hashlib
import json
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from preprocess.errors import MediaInvalid, MediaUndecodable
from preprocess.types import MediaLayout, MediaSource, Modality

WIDTH = 8


def layout_of(spec: dict[str, object], modality: Modality) -> MediaLayout:
    """`spec` is the content of a medium: {"grid": [t, h, w]}, {"times": ...}, {"slices": [[start, length], ...]} ..."""
    if modality is Modality.AUDIO:
        return MediaLayout(modality, num_audio_rows=int(str(spec["rows"])))
    grid = tuple(spec["grid"])  # type: ignore[arg-type]
    slices = tuple((int(start), int(length)) for start, length in spec.get("slices", ()))  # type: ignore[attr-defined]
    times = tuple(float(time_s) for time_s in spec.get("times", ()))  # type: ignore[attr-defined]
    return MediaLayout(
        modality,
        grid_thw=grid,
        timestamps_s=times,
        audio_slices=slices,
        num_audio_rows=sum(length for _, length in slices),
    )


def rows_of(content: bytes, num_rows: int, width: int, dtype: str) -> bytes:
    """The embedding of a content: reproducible, and different for different contents."""
    seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal((num_rows, width)).astype(np.float32)
    if dtype == "float32":
        return values.tobytes()
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def url_of(**spec: object) -> str:
    """A data: URL of a medium, as the specification that `FakeDesk` reads."""
    return "data:application/json;base64," + base64.b64encode(json.dumps(spec).encode()).decode()


@dataclass
class FakeEncoding:
    """One medium."""

    layout: MediaLayout
    dtype: str
    width: int
    rows: memoryview
    desk: "FakeDesk"
    _is_leased: bool = True

    def release(self) -> None:
        if self._is_leased:
            self._is_leased = False
            self.desk.num_leased -= 1
            # What a reader of released rows would see.
            self.rows[:] = b"\xff" * self.rows.nbytes


@dataclass
class FakeDesk:
    """Encodes specifications. A content of {"fail": "..."} fails, {"wait": name} waits for `gates[name]`."""

    dtype: str = "bfloat16"
    width: int = WIDTH
    modalities: tuple[Modality, ...] = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
    num_leased: int = 0
    sources: list[MediaSource] = field(default_factory=list)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    num_encoded: int = 0

    async def encode(
        self, source: MediaSource, *, asker: Hashable, deadline_unix_s: float, sha256: bytes | None = None
    ) -> FakeEncoding:
        self.sources.append(source)
        content = base64.b64decode(source.url.partition(",")[2])
        if sha256 is not None and hashlib.sha256(content).digest() != sha256:
            raise MediaInvalid("the content has another SHA-256")
        spec = json.loads(content)
        if "wait" in spec:
            await self.gates.setdefault(spec["wait"], asyncio.Event()).wait()
        await asyncio.sleep(0.001 * spec.get("pause_ms", 0))
        if "fail" in spec:
            raise MediaUndecodable(spec["fail"])
        if "crash" in spec:
            raise ZeroDivisionError(spec["crash"])
        if source.options.use_audio is False:
            spec.pop("slices", None)
        layout = layout_of(spec, source.modality)
        rows = bytearray(rows_of(content, layout.num_rows, self.width, self.dtype))
        self.num_leased += 1
        self.num_encoded += 1
        return FakeEncoding(layout, self.dtype, self.width, memoryview(rows), self)
