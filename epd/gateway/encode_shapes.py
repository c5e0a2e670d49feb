"""The shapes of what `POST /v1/encode` takes as a form, and of what it answers: one item for each medium."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from epd.gateway.answer_shapes import AnswerShape, Error, ErrorDetail, NonNegative, Seconds


class EncodeForm(BaseModel):
    """Fields of the form that are no files. Options of media, such as max_pixels and fps, are fields as well."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    encoding_format: Literal["base64", "float"] | None = None


class EncodeTimings(AnswerShape):
    """Where the time of one medium went."""

    model_config = ConfigDict(extra="allow")

    fetch_s: Seconds


class MediumRows(AnswerShape):
    """One medium encoded. `embedding` has `rows` rows of `width` values: bytes of `dtype` as base64, or numbers.

    `grid_thw` are frames, rows and columns of patches; `timestamps_s` are those of frames; `num_audio_rows` is how many
    of a video's rows are of its sound. `cached` says whether the rows were there already.
    """

    index: NonNegative
    object: Literal["embedding"]
    key: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    modality: Literal["image", "video", "audio"]
    rows: NonNegative
    width: NonNegative
    dtype: Literal["float32", "bfloat16"]
    grid_thw: list[NonNegative] | None
    timestamps_s: list[float]
    num_audio_rows: int
    cached: bool
    warnings: list[str]
    timings: EncodeTimings
    embedding: str | list[list[float]]


class MediumError(AnswerShape):
    """One medium that could not be encoded; `status` is what a request for it alone would have got."""

    index: NonNegative
    object: Literal["error"]
    status: Annotated[int, Field(ge=400, le=599)]
    error: ErrorDetail


class Encoded(AnswerShape):
    """One item for each medium, in the order of the request."""

    object: Literal["list"]
    model: str
    data: Annotated[list[MediumRows | MediumError], Field(min_length=1)]


class EncodeFailed(Error):
    """No medium could be encoded: `error` says most about trying again, `data` has every medium's own."""

    data: Annotated[list[MediumError], Field(min_length=2)] = Field(default_factory=list)
