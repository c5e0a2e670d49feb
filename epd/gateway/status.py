"""What the gateway says about itself: models, health, readiness, metrics."""

from collections.abc import Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from epd.config import GatewayConfig
from epd.gateway.admission import Admission
from epd.gateway.answer_shapes import Health, ModelCard, ModelList, NotReady, Ready
from epd.gateway.chat import ChatService
from epd.gateway.media import Encoder
from epd.gateway.metrics import STAGE_OF_ROLE, GatewayMetrics
from epd.gateway.operations import Answer, Operation
from epd.gateway.validation import unknown_model
from epd.router.workers import Fleet
from epd.types import Role


class Status:
    """Everything shared is handed in."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        chat: ChatService,
        fleet: Fleet,
        encoder: Encoder,
        metrics: GatewayMetrics,
        admission: Admission,
    ) -> None:
        self._config = config
        self._chat = chat
        self._fleet = fleet
        self._encoder = encoder
        self._metrics = metrics
        self._admission = admission
        self._created_unix_s = int(chat.unix_clock())

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation(
                method="GET",
                path="/v1/models",
                handler=self.models,
                tag="models",
                summary="List the models served",
                responses={200: Answer(description="The models", shape=ModelList)},
            ),
            Operation(
                method="GET",
                path="/v1/models/{model}",
                handler=self.model,
                tag="models",
                summary="Describe one model",
                responses={200: Answer(description="The model", shape=ModelCard)},
                errors=(404,),
            ),
            Operation(
                method="GET",
                path="/health",
                handler=self.health,
                tag="status",
                summary="Whether the process lives",
                responses={200: Answer(description="It does", shape=Health)},
                is_open=True,
            ),
            Operation(
                method="GET",
                path="/ready",
                handler=self.ready,
                tag="status",
                summary="Whether every stage takes work",
                responses={
                    200: Answer(description="It does", shape=Ready),
                    503: Answer(description="It does not, and why", shape=NotReady),
                },
                is_open=True,
            ),
            Operation(
                method="GET",
                path="/metrics",
                handler=self.metrics_text,
                tag="status",
                summary="Metrics in Prometheus' text format",
                responses={200: Answer(description="The metrics", media_type="text/plain")},
                is_open=True,
            ),
        )

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._config.model_name:
            raise unknown_model(name, self._config)
        return web.json_response(self._model_card())

    async def health(self, _: web.Request) -> web.Response:
        """The process lives; says nothing of the stages."""
        return web.json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """200 when every process of every stage takes work, or at least one, else 503 and why, by stage."""
        if self._admission.draining:
            return _readiness({"status": "draining"}, status=503)
        stages: dict[str, list[str]] = {}
        for role in self._fleet.roles:
            listed = self._config.decode if role is Role.DECODE else self._config.prefill
            reasons = [self._fleet.why_not_ready(worker) for worker in self._fleet.of_role(role)]
            stages[STAGE_OF_ROLE[role]] = self._missing(listed, reasons)
        encoders = self._encoder.why_not_up()
        troubles = [None if why is None else f"{name}: {why}" for name, why in encoders.items()]
        stages["encoder"] = self._missing(self._config.encoders, troubles)
        missing = {stage: reasons for stage, reasons in stages.items() if reasons}
        status = {"status": "waiting", "waiting_for": missing} if missing else {"status": "ready"}
        return _readiness(status, status=503 if missing else 200)

    def _missing(self, listed: Sequence[str], reasons: Sequence[str | None]) -> list[str]:
        """Why a stage is not ready: of its members that are known, those that keep it from being so."""
        if listed and not reasons:
            return [f"{address}: no process is known there" for address in listed]
        is_ready = not self._config.ready_needs_all and None in reasons
        return [] if is_ready else [reason for reason in reasons if reason is not None]

    async def metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "mimo-epd",
            "max_model_len": self._chat.max_context_tokens,
        }


def _readiness(body: dict[str, Any], *, status: int) -> web.Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response(body, status=status, headers=headers)
