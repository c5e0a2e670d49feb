"""A worker's engine stepped by hand in the calling thread, without processes or a gateway: for measuring it.

Everything below the transport is what a worker runs: scheduler, prefix cache, pools, runner, model and attention.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from encoder.types import Farewell, Goodbye
from encoder.wire import TensorFrame
from epd.config import EngineConfig
from epd.engine.worker import build_engine
from epd.kernels.reference import DenseAttention
from epd.model.weights import load_text_model
from epd.transport.base import Message, Peer, Received
from epd.types import Finish, FinishReason, GenerateRequest, SamplingParams, Submit, TokenDelta, Usage

_FAR_OFF_S = 1e6
# Longer than any copy or write of a trial takes.
_SETTLE_S = 60.0
_ASKER = Peer(b"trial")


class TrialFailed(Exception):
    """A request of the trial ended with an error; the message is the engine's."""


class EngineTrial:
    """Requests go in with `submit`, `step` is one step of the engine. Greedy, and no token ends an answer early."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model and takes the KV memory. Raises what `epd.REFUSALS` lists."""
        self._model = load_text_model(
            config.model_dir,
            dtype=getattr(torch, config.dtype),
            device=config.device,
            window_left=config.window_left,
            with_mtp=False,
        ).eval()
        self._device = config.device
        self._desk = _Desk()
        # Between two requests as much time may pass as the caller likes.
        self._engine = build_engine(replace(config, peer_timeout_s=_FAR_OFF_S), self._desk, model=self._model)
        self._num_asked = 0
        self._wait_s = 0.0
        self.answers: dict[str, list[int]] = {}
        """Tokens so far, by request id."""
        self.usage: dict[str, Usage] = {}
        """Of the requests that have ended."""

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return fp32 [tokens, vocabulary] of one prompt by the model alone, nothing cached."""
        ids_T = torch.tensor(token_ids, device=self._device)
        positions_T = torch.arange(len(ids_T), device=self._device)
        hidden_TD = self._model(self._model.embed(ids_T), positions_T, DenseAttention([len(ids_T)]))
        return self._model.logits(hidden_TD)

    def submit(self, token_ids: Sequence[int], *, max_tokens: int) -> str:
        """Ask for a continuation; returns the request's id."""
        self._num_asked += 1
        request_id = f"trial-{self._num_asked}"
        now_s = time.time()
        request = GenerateRequest(
            request_id=request_id,
            token_ids=tuple(token_ids),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            arrival_unix_s=now_s,
            deadline_unix_s=now_s + _FAR_OFF_S,
        )
        self.answers[request_id] = []
        self._desk.inbox.append(Received(_ASKER, Submit(request=request)))
        return request_id

    def step(self) -> int:
        """One step of the engine; returns how many tokens it gave. Raises TrialFailed."""
        # As a worker's loop does it: while nothing can be computed, threads that copy have the interpreter.
        self._wait_s = self._engine.loop.step(self._wait_s)
        sent, self._desk.sent = self._desk.sent, []
        num_tokens = 0
        for message in sent:
            if isinstance(message, TokenDelta):
                self.answers[message.request_id] += message.token_ids
                num_tokens += len(message.token_ids)
            elif isinstance(message, Finish):
                if message.reason is FinishReason.FAILED:
                    raise TrialFailed(f"{message.request_id}: {message.message}")
                self.usage[message.request_id] = message.usage
        return num_tokens

    def settle(self) -> None:
        """Step until nothing is on its way between device, host and store. Raises TrialFailed."""
        until_s = time.monotonic() + _SETTLE_S
        while self._engine.cache.next_event_pending:
            self.step()
            if time.monotonic() > until_s:
                raise TrialFailed(f"KV was still on its way between the tiers after {_SETTLE_S:g} s")

    def forget(self, what: Literal["windows", "device", "host"]) -> None:
        """Drop all windows from the device, or everything, or everything from the host's memory; what the next tier is
        to have of it is there after `settle`. Nothing may be running."""
        cache = self._engine.cache
        if what == "host" and cache.host is not None:
            cache.host.full.clear()
            cache.host.window.clear()
        elif what == "device":
            cache.device.clear()
        elif what == "windows":
            cache.device.ledger.evict_window(cache.device.ledger.num_evictable_window)

    def close(self) -> None:
        """End the engine's threads; the store gets what is still on its way there, within seconds."""
        self._engine.feed.close()
        self._engine.tiers.close()

    def finish(self) -> None:
        """Step until every request has ended, and forget them all. Raises TrialFailed."""
        while len(self.usage) < len(self.answers):
            self.step()
        self.answers.clear()
        self.usage.clear()


class _Desk:
    """A mailbox of two lists; see `epd.transport.base.Endpoint`."""

    address = "trial"
    num_dropped = 0

    def __init__(self) -> None:
        self.inbox: list[Received] = []
        self.sent: list[Message] = []
        self._woken = threading.Event()

    def receive(self, timeout_s: float) -> list[Received]:
        if not self.inbox and timeout_s > 0:
            self._woken.wait(timeout_s)
        self._woken.clear()
        received, self.inbox = self.inbox, []
        return received

    def send(self, peer: Peer, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        if isinstance(message, Farewell):
            self.inbox.append(Received(peer, Goodbye(sequence=message.sequence)))
        else:
            self.sent.append(message)

    def connect(self, address: str) -> None:
        """There is nobody else."""

    def send_to(self, address: str, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        raise AssertionError(f"a trial has no worker at {address}")

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        """Nothing is open."""
