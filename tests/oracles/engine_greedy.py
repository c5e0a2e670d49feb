"""Greedy answers of our engine, many prompts at once, stepped by hand."""

from collections.abc import Sequence
from pathlib import Path

import torch

from epd.config import EngineConfig
from epd.engine.worker import Engine, build_engine
from epd.types import Finish, GenerateRequest, Role, SamplingParams, Submit, TokenDelta
from tests.fakes.mailbox import Mailbox


def engine_greedy(
    model_dir: Path, prompts: Sequence[Sequence[int]], num_tokens: int, *, threads: int = 1
) -> tuple[list[list[int]], Engine]:
    """`num_tokens` ids for every prompt, end marks ignored, at most 16 at a time; and the engine as they left it."""
    config = EngineConfig(
        model_dir=model_dir,
        model_name="greedy",
        role=Role.BOTH,
        kv_budget_bytes=384 << 20,
        # Nobody pings: a slow machine must not take the test for a gateway that died.
        peer_timeout_s=1e6,
    )
    torch.set_num_threads(threads)
    mailbox = Mailbox("worker")
    engine = build_engine(config, mailbox)
    for i, prompt in enumerate(prompts):
        request = GenerateRequest(
            request_id=str(i),
            token_ids=tuple(prompt),
            spans=(),
            embeddings=(),
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
            arrival_unix_s=0.0,
            deadline_unix_s=4e9,
        )
        mailbox.put(Submit(request=request))
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    num_finished = 0
    while num_finished < len(prompts):
        engine.loop.step()
        engine.loop.check()
        for message in mailbox.take():
            match message:
                case TokenDelta(request_id=request_id, token_ids=token_ids):
                    answers[request_id].extend(token_ids)
                case Finish():
                    assert message.usage.completion_tokens == num_tokens, message
                    num_finished += 1
    return [answers[str(i)] for i in range(len(prompts))], engine
