"""`POST /v1/encode` on the gateway: the dialect of encoders that are served by themselves, over the same encoders that
chat uses, with what the client keeps here (files, media by key) in reach."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Literal

from aiohttp import web
from pydantic import Field

from encoder import EncodeDesk, EncodeEndpoint, EncodeLimits, PaceLimits
from encoder import Refused as FrontRefusal
from encoder.errors import EncoderError
from epd.config import GatewayConfig
from epd.errors import InvalidRequest, ServeError
from epd.gateway.admission import Admission
from epd.gateway.encode_shapes import Encoded, EncodeFailed, EncodeForm
from epd.gateway.examples import ENCODE
from epd.gateway.library import Libraries, Library
from epd.gateway.media import Encoder, MediaFetcher
from epd.gateway.operations import MEDIA_ERRORS, Answer, FormBody, Operation
from epd.gateway.owner import owner_of
from epd.gateway.problems import Problem, Refused, problem_of
from epd.gateway.schema_parts import AudioPart, FilePart, ImagePart, InputAudioPart, VideoPart
from epd.gateway.shape import Shape
from epd.gateway.sse import ANSWER_HEADERS
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaError
from preprocess.types import MediaKey, MediaOptions, Modality


class EncodeBody(Shape):
    """POST /v1/encode as JSON. As a form it has the files themselves, and `model`, `encoding_format` and options as
    fields."""

    input: Annotated[
        list[Annotated[ImagePart | VideoPart | AudioPart | InputAudioPart | FilePart, Field(discriminator="type")]],
        Field(min_length=1),
    ]
    model: str | None = None
    encoding_format: Literal["base64", "float"] | None = None


class Encode:
    """Everything shared is handed in. `processor` is None for a model that takes text only."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        fetcher: MediaFetcher,
        encoder: Encoder,
        processor: ProcessorConfig | None,
        libraries: Libraries,
        admission: Admission,
        patience_s: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._libraries = libraries
        self._admission = admission
        self._unix_clock = unix_clock
        self._endpoint: EncodeEndpoint | None = None
        if processor is not None:
            desk = EncodeDesk(
                fetcher=fetcher,
                encoder=encoder,
                processor=processor,
                max_inflight=config.max_media,
                patience_s=patience_s,
                clock=unix_clock,
            )
            self._endpoint = EncodeEndpoint(_limits(config), desk=desk)

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation(
                method="POST",
                path="/v1/encode",
                handler=self.encode,
                tag="media",
                summary="Embeddings of pictures, videos and sounds",
                description="As JSON, or as a form with files. With `Accept: application/x-safetensors` the rows come "
                "as one safetensors file. An item that fails has its error in its place, and the others their rows.",
                request=EncodeBody,
                examples=ENCODE,
                form=FormBody(shape=EncodeForm, files=("image", "video", "audio"), is_any=True),
                responses={
                    200: Answer(
                        description="The rows of every item, or why there are none",
                        shape=Encoded,
                        media_type="application/x-safetensors",
                    )
                },
                error_shape=EncodeFailed,
                errors=(*MEDIA_ERRORS, 403, 429),
            ),
        )

    async def encode(self, request: web.Request) -> web.StreamResponse:
        if self._endpoint is None:
            raise InvalidRequest("this model takes text only; it has no towers that could encode media")
        async with self._admission.session():
            self._admission.check()
            async with self._admission.deadline():
                return await self._answer(request, self._endpoint)

    async def _answer(self, request: web.Request, endpoint: EncodeEndpoint) -> web.StreamResponse:
        headers: dict[str, str] = request[ANSWER_HEADERS]
        try:
            return await endpoint.answer(
                request,
                headers=headers,
                deadline_unix_s=self._unix_clock() + self._config.request_timeout_s,
                shelf=_Shelf(self._libraries.of(owner_of(request))),
                place=self._admission.place(),
            )
        except FrontRefusal as refused:
            problem = refused.problem
            raise Refused(
                Problem(problem.status, problem.code, problem.message, problem.param, problem.retry_after_s)
            ) from refused
        except (MediaError, EncoderError) as error:
            raise Refused(problem_of(error)) from error


class _Shelf:
    """A client's library as the endpoint asks it."""

    def __init__(self, library: Library) -> None:
        self._library = library

    async def kind_of_file(self, file_id: str, param: str) -> Modality:
        try:
            return await asyncio.to_thread(self._library.kind_of_file, file_id, param)
        except ServeError as error:
            raise _refusal(error) from error

    async def file(self, file_id: str, param: str) -> bytes:
        try:
            return await self._library.file(file_id, param)
        except ServeError as error:
            raise _refusal(error) from error

    def content_of(self, key: MediaKey) -> tuple[bytes, Modality, MediaOptions] | None:
        found = self._library.named(uuid=None, key=key)
        return None if found is None else (found.content, found.modality, found.options)


def _refusal(error: ServeError) -> FrontRefusal:
    return FrontRefusal(error.status, error.code, error.message, param=error.param, retry_after_s=error.retry_after_s)


def _limits(config: GatewayConfig) -> EncodeLimits:
    return EncodeLimits(
        model_name=config.model_name,
        max_body_bytes=config.max_body_bytes,
        max_file_bytes=config.fetch.max_bytes,
        body_pace=PaceLimits(timeout_s=config.body_timeout_s),
        max_items=config.max_media,
        max_reply_bytes=config.encode_reply_bytes,
    )
