"""Score the exported checkpoint through the code that serves it.

    python -m training.evaluate --count 500

`mimo eval` asks a running service; this runs in one process and also measures the draft heads. Every held-out sample
becomes a real file (PNG, H.264 in MP4, 16-bit WAV), goes through `preprocess`, the towers, the chat template and the
text model, and counts as right when every answer token, the end included, is the most likely one: the answer that
greedy decoding gives.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from tokenizers import Tokenizer
from torch import Tensor

from encoder.towers.weights import Towers, load_towers
from epd.kernels.reference import BatchedDenseAttention
from epd.model.hybrid import HybridModel
from epd.model.weights import load_text_model
from preprocess.config import ProcessorConfig
from preprocess.pipeline import prepare
from preprocess.tokens import MediaTokenIds, expand
from preprocess.types import MediaKey, MediaOptions, Modality, PreparedMedia
from training.files import Conversation, File, conversation
from training.tasks import TASKS
from training.tasks.types import HELD_OUT_SEED
from training.vocabulary import BUILTIN

TRIPLES = {
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
    "<|mimo_audio_start|><|audio_pad|><|mimo_audio_end|>",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, media rows with the positions they fill, and where the answer begins."""

    ids: list[int]
    rows: list[tuple[list[int], Tensor]]
    answer_start: int


class Served:
    """The exported checkpoint in fp32, driven the way the server drives it."""

    def __init__(self, folder: Path = BUILTIN, dtype: torch.dtype = torch.float32) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.model: HybridModel = load_text_model(folder, dtype=dtype)
        self.towers: Towers = load_towers(folder, dtype)
        self.dtype = dtype
        self.processor = ProcessorConfig.from_hf(config)
        self.media_ids = MediaTokenIds.from_hf(config)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = jinja2.Environment().from_string((folder / "chat_template.jinja").read_text())
        self.end = int(config["eos_token_id"])

    def encode(self, piece: str) -> list[int]:
        """Ids of one piece of text."""
        return list(self.tokenizer.encode(piece, add_special_tokens=False).ids) if piece else []

    def rows_of(self, media: PreparedMedia) -> Tensor:
        """Tower output of one medium, `[rows, D]`."""
        if media.patches is not None:
            assert self.towers.vision is not None
            pixels = torch.from_numpy(media.patches.pixel_values).to(self.dtype)
            rows: Tensor = self.towers.vision(pixels, [media.patches.grid_thw])
            return rows
        assert self.towers.audio_tokenizer is not None
        assert self.towers.audio_encoder is not None
        assert media.mel is not None
        codes = self.towers.audio_tokenizer.encode(torch.from_numpy(media.mel.log_mel))
        sound_rows: Tensor = self.towers.audio_encoder([codes])
        return sound_rows

    def prompt(self, messages: list[dict[str, Any]], files: list[tuple[Modality, bytes]], answer: str) -> Prompt:
        """Render, split at the media, tokenise every text piece alone, expand, and append the answer."""
        text_left = self.template.render(messages=messages, add_generation_prompt=True)
        ids: list[int] = []
        rows: list[tuple[list[int], Tensor]] = []
        for modality, content in files:
            media = prepare(
                content, modality=modality, options=MediaOptions(), config=self.processor, key=MediaKey("0" * 32)
            )
            place, triple = min((text_left.index(triple), triple) for triple in TRIPLES if triple in text_left)
            ids += self.encode(text_left[:place])
            text_left = text_left[place + len(triple) :]
            expansion = expand(media.layout, self.media_ids, self.encode)
            places = [len(ids) + run.offset + step for run in expansion.runs for step in range(run.length)]
            rows.append((places, self.rows_of(media)))
            ids += expansion.token_ids
        ids += self.encode(text_left)
        return Prompt([*ids, *self.encode(answer), self.end], rows, len(ids))

    @torch.no_grad()
    def states(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Embedded input and normed trunk states, `[T, D]` each."""
        hidden_TD = self.model.embed(torch.tensor(prompt.ids)).clone()
        for places, values in prompt.rows:
            hidden_TD[torch.tensor(places)] = values.to(hidden_TD.dtype)
        positions = torch.arange(len(prompt.ids))
        return hidden_TD, self.model(hidden_TD, positions, BatchedDenseAttention(1, len(prompt.ids)))

    @torch.no_grad()
    def judge(self, prompt: Prompt, drafts: list[list[int]]) -> bool:
        """Whether greedy decoding gives the answer; adds [right, total] draft counts per MTP head."""
        hidden_TD, states_TD = self.states(prompt)
        start, ids = prompt.answer_start, torch.tensor(prompt.ids)
        chosen = self.model.logits(states_TD[start - 1 : -1]).argmax(-1)
        right = bool((chosen == ids[start:]).all())
        positions = torch.arange(len(ids))
        for k in range(self.model.num_mtp_layers):
            shifted = torch.roll(hidden_TD, -1 - k, 0)
            out = self.model.draft(k, shifted, states_TD, positions, BatchedDenseAttention(1, len(ids)))
            rows = torch.arange(start - 1, max(start - 1, len(ids) - 2 - k))
            if right and len(rows):
                hits = self.model.logits(out[rows]).argmax(-1) == ids[rows + 2 + k]
                drafts[k][0] += int(hits.sum())
                drafts[k][1] += len(rows)
        return right

    @torch.no_grad()
    def answer(self, messages: list[dict[str, Any]], files: list[tuple[Modality, bytes]], limit: int = 320) -> str:
        """Plain greedy decoding without a cache."""
        prompt = self.prompt(messages, files, "")
        ids = prompt.ids[:-1]
        while len(ids) < prompt.answer_start + limit:
            _, states_TD = self.states(Prompt(ids, prompt.rows, prompt.answer_start))
            best = int(self.model.logits(states_TD[-1:]).argmax())
            if best == self.end:
                break
            ids.append(best)
        return str(self.tokenizer.decode(ids[prompt.answer_start :]))


def as_messages(asked: Conversation) -> tuple[list[dict[str, Any]], list[tuple[Modality, bytes]], str]:
    """Messages for the chat template, their media as files in order, and the wanted answer."""
    messages: list[dict[str, Any]] = []
    files: list[tuple[Modality, bytes]] = []
    for message in asked.messages:
        parts: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, File):
                parts.append({"type": str(part.modality)})
                files.append((part.modality, part.content))
            else:
                parts.append({"type": "text", "text": part})
        messages.append({"role": message.role, "content": parts})
    return messages, files, asked.answer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="index of the first held-out sample")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--folder", type=Path, default=BUILTIN)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--show-misses", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    served = Served(args.folder, getattr(torch, args.dtype))
    for task in args.tasks:
        started, right = time.time(), 0
        drafts = [[0, 0] for _ in range(served.model.num_mtp_layers)]
        shown = 0
        for index in range(args.first, args.first + args.count):
            messages, files, answer = as_messages(conversation(task, HELD_OUT_SEED, index))
            good = served.judge(served.prompt(messages, files, answer), drafts)
            right += good
            if not good and shown < args.show_misses:
                shown += 1
                print(f"  miss {index}: wanted {answer!r}, got {served.answer(messages, files)!r}", flush=True)
        accepted = " ".join(f"{hits / max(total, 1):.3f}" for hits, total in drafts)
        print(
            f"{task}: {right}/{args.count} = {right / args.count:.3f}, drafts right per head {accepted}, "
            f"{time.time() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
