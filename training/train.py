"""Train mimo-nano on all tasks at once.

    python -m training.train --resume --minutes 75

Every step mixes the tasks. The learning rate is flat, then falls to zero over the second half of the wall-clock budget.
State lives in runs/nano.pt; `--resume` continues from it. Held-out exact match per task is printed: the share of
samples whose every answer token is the most likely one, which is what greedy decoding gets right.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.batch import Batch, Encoded, Encoder, collate
from training.export import export
from training.nano import Nano, exact_matches, mtp_losses, task_losses
from training.nets.text import Moe
from training.optim import build_optimisers, set_rate
from training.pretrain_audio import disturb
from training.sounds import make_clip
from training.tasks import TASKS, audio, text
from training.tasks.types import HELD_OUT_SEED, Codes, Part, Sample, Turn, pick
from training.vocabulary import BUILD
from training.warm_start import take_over

RUNS = Path("runs")
STATE = RUNS / "nano.pt"
TRAIN_SEED = 10
MAX_SENTENCES = 135
WEIGHTS = {
    "shapes": 1.5,
    "read": 1.5,
    "video": 1.0,
    "keys": 1.0,
    "beeps": 1.0,
    "recall": 2.5,
    "records": 1.5,
    "count": 1.0,
    "repeat": 1.0,
    "small_talk": 0.3,
}
PROBE_WEIGHT = 0.3
SOUND_QUESTIONS = {"keys": audio.QUESTIONS, "beeps": audio.BEEP_QUESTIONS}


class Mixer:
    """Draws the samples of a step. `longest` is how many filler sentences the recall task may have by now."""

    def __init__(self, books: list[Tensor]) -> None:
        self.encode = Encoder()
        self.books = books
        self.longest = 4
        self.shares = {
            "shapes": 10,
            "read": 12,
            "video": 4,
            "keys": 6,
            "beeps": 7,
            "recall": 300,
            "records": 3,
            "count": 2,
            "repeat": 3,
            "small_talk": 1,
        }
        self.pools: dict[str, list[Tensor]] = {}

    @property
    def most_keys(self) -> int:
        """How many key lines a text may hold by now: two at first, so that finding any digits comes before choosing."""
        return min(8, max(2, self.longest // 3))

    def num_questions(self, rng: np.random.Generator, num_sentences: int) -> int:
        """A long text is dear, so it is asked for most of its keys."""
        lowest, highest = (5, 8) if num_sentences > 20 else (2, 8)
        return int(rng.integers(min(lowest, self.most_keys), min(highest, self.most_keys) + 1))

    def sound_sample(self, task: str, seed: int, index: int, held_out: bool = False) -> Sample:
        """A sample of the task `keys` or `beeps` from the pool of tokenised clips, with a fresh question."""
        if not self.pools:
            self.pools = torch.load(RUNS / "sounds.pt", weights_only=True)
        name = task
        if held_out:
            name = "held_out_beeps" if task == "beeps" else "held_out"
        elif task == "keys" and index % 3 == 2:
            name = "few"
        codes = self.pools[name]
        place = index % len(codes) if held_out else index // 3 % len(codes) if name == "few" else index % len(codes)
        sample = make_clip(name, place)
        groups = codes[place].long()
        groups = groups if held_out else disturb(groups, self.books, 0.02)
        rng = np.random.default_rng((seed, index))
        question: tuple[Part, ...] = (Codes(groups), pick(rng, SOUND_QUESTIONS[task]))
        if rng.random() < 0.4:
            question = question[::-1]
        return dataclasses.replace(sample, turns=(Turn(question, sample.turns[0].answer),))

    def recall_samples(self, seed: int, step: int, token_budget: int) -> list[Sample]:
        """Texts of one length, drawn between 1 and `longest` sentences on a log scale; short ones ask several times."""
        rng = np.random.default_rng((seed, step, 5))
        if self.longest > 30 and step // 2 % 2:  # every second step stays cheap
            num_sentences = int(np.exp(rng.uniform(0, np.log(30))))
        else:
            num_sentences = int(np.exp(rng.uniform(np.log(max(1, self.longest / 6)), np.log(self.longest + 1))))
        count = max(1, token_budget // (num_sentences * 11 + 200))
        return [
            text.recall(
                seed,
                step * 64 + place,
                num_sentences,
                self.num_questions(rng, num_sentences),
                self.most_keys,
                crowded=bool(rng.random() < 0.3),
            )
            for place in range(count)
        ]

    def draw(self, step: int) -> Batch:
        """One training step."""
        samples = [
            make(TRAIN_SEED, step * 64 + place)
            for task, make in TASKS.items()
            if task not in ("keys", "beeps", "recall")
            for place in range(self.shares[task])
        ]
        samples += [
            self.sound_sample(task, step, step * self.shares[task] + place)
            for task in ("keys", "beeps")
            for place in range(self.shares[task])
        ]
        if self.shares["recall"]:
            samples += self.recall_samples(TRAIN_SEED, step, self.shares["recall"])
        return collate([self.encode(sample) for sample in samples])

    def held_out(self, count: int, num_sentences: int) -> list[Encoded]:
        """Held-out samples of every task that is trained; recall at the given length."""
        seed, samples = HELD_OUT_SEED, []
        for index in range(count):
            for task, make in TASKS.items():
                rarely = task in ("count", "small_talk", "records", "recall")
                if not self.shares[task] or (rarely and index % 2):
                    continue
                if task == "recall":
                    samples.append(text.recall(seed, index, num_sentences, max_keys=self.most_keys))
                elif task in ("keys", "beeps"):
                    samples.append(self.sound_sample(task, seed, index, held_out=True))
                else:
                    samples.append(make(seed, index))
        return [self.encode(sample) for sample in samples]


@torch.no_grad()
def evaluate(net: Nano, samples: list[Encoded], chunk: int = 64) -> dict[str, float]:
    """Exact match per task."""
    net.eval()
    totals: dict[str, tuple[int, int]] = {}
    samples = sorted(samples, key=lambda sample: len(sample.ids))
    for start in range(0, len(samples), chunk):
        batch = collate(samples[start : start + chunk])
        with torch.autocast("cpu", torch.bfloat16):
            _, _, logits, _ = net(batch)
        for task, (right, total) in exact_matches(batch, logits).items():
            before = totals.get(task, (0, 0))
            totals[task] = before[0] + right, before[1] + total
    net.train()
    return {task: right / total for task, (right, total) in sorted(totals.items())}


class Trainer:
    """Network, optimisers and progress; saved and restored as one file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.net = Nano()
        audio_state = torch.load(RUNS / "audio.pt", weights_only=True)
        self.mixer = Mixer(audio_state["books"])
        towers = nn.ModuleList([self.net.vision, self.net.audio])
        plain = ("embed", "head", "router", "patch_embed")
        self.optimisers = build_optimisers(self.net.text, args.lr, args.lr * 0.7, plain) + build_optimisers(
            towers, args.lr * 0.4, args.lr * 0.3, plain
        )
        self.optimisers += build_optimisers(self.net.probe, args.lr, args.lr * 0.4, plain)
        self.step, self.spent_s = 0, 0.0
        if args.resume and STATE.exists():
            self.restore()
        elif args.start:
            take_over(self.net, args.start, args.start_tokenizer, BUILD / "tokenizer.json")
            self.mixer.longest = args.longest
        self.mixer.shares |= dict.fromkeys(args.leave_out, 0)
        if "vision" in args.load_towers:
            vision_state = torch.load(RUNS / "vision.pt", weights_only=True)
            self.net.vision.load_state_dict(vision_state["net"])
            self.net.probe.load_state_dict(vision_state["probe"])
        if "audio" in args.load_towers:
            self.net.audio.load_state_dict(audio_state["encoder"])

    def restore(self) -> None:
        """Continue from runs/nano.pt."""
        state: dict[str, Any] = torch.load(STATE, weights_only=True)
        missing, _ = self.net.load_state_dict(state["net"], strict=False)
        if missing:
            self.net.probe.load_state_dict(torch.load(RUNS / "vision.pt", weights_only=True)["probe"])
        for optimiser, kept in zip(self.optimisers, state["optimisers"], strict=False):
            peaks = [group["peak"] for group in optimiser.param_groups]
            optimiser.load_state_dict(kept)
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["peak"] = peak
        self.step, self.spent_s, self.mixer.longest = state["step"], state["spent_s"], state["longest"]

    def save(self) -> None:
        """Write the state through a temporary file."""
        state = {
            "net": self.net.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "spent_s": self.spent_s,
            "longest": self.mixer.longest,
        }
        torch.save(state, STATE.with_suffix(".tmp"))
        STATE.with_suffix(".tmp").replace(STATE)

    def rate(self) -> float:
        """Share of the peak learning rate: short warm-up, flat, linear fall over the last 57 %."""
        progress = self.spent_s / 60 / self.args.minutes
        return min(1.0, (self.step + 1) / 60) * min(1.0, max(0.01, (1 - progress) / 0.57))

    def train_step(self) -> dict[str, Tensor]:
        """Forward, backward, update; returns the losses."""
        batch = self.mixer.draw(self.step * self.args.processes + self.args.rank)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.set_grad_enabled(not self.args.mtp_only):
                hidden_TD, states_TD, logits_AV, probe_loss = self.net(batch)
                losses = task_losses(batch, logits_AV)
            weighted = [WEIGHTS[task] * loss for task, loss in losses.items()]
            total = torch.stack([*weighted, PROBE_WEIGHT * probe_loss]).sum()
            losses["probe"] = probe_loss
            if self.args.mtp_only or (self.args.mtp_every and self.step % self.args.mtp_every == 0):
                drafts = mtp_losses(self.net, batch, hidden_TD, states_TD)
                total = torch.stack([total, *(loss for loss, _ in drafts)]).sum()
                losses |= {f"draft{k}": hits for k, (_, hits) in enumerate(drafts)}
        total.backward()
        self.share_gradients()
        nn.utils.clip_grad_norm_(self.net.parameters(), 2.0)
        set_rate(self.optimisers, self.rate())
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        return losses

    def share_gradients(self) -> None:
        """Mean of the gradients over the processes; the routers' load is summed."""
        if self.args.processes == 1:
            return
        gradients = [param.grad for param in self.net.parameters() if param.grad is not None]
        loads = [module.load for module in self.net.modules() if isinstance(module, Moe)]
        flat = torch.cat([tensor.reshape(-1) for tensor in (*gradients, *loads)])
        dist.all_reduce(flat)
        sizes = [tensor.numel() for tensor in (*gradients, *loads)]
        for tensor, part in zip((*gradients, *loads), flat.split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))
        for gradient in gradients:
            gradient.div_(self.args.processes)
        for load in loads:  # so that a later sum over the processes gives the sum again
            load.div_(self.args.processes)

    def report(self, seconds: float, losses: dict[str, float]) -> None:
        """Held-out scores, curriculum, balance; saves the state."""
        scores = evaluate(self.net, self.mixer.held_out(self.args.held_out, self.mixer.longest))
        routers = self.net.text.routers()
        balance = sum(router.evenness() for router in routers) / len(routers)
        if scores.get("recall", 0.0) >= 0.65 and self.mixer.longest < MAX_SENTENCES:
            self.mixer.longest = min(MAX_SENTENCES, int(self.mixer.longest * 1.5) + 1)
        print(
            f"[{time.strftime('%H:%M:%S')}] step {self.step} spent {self.spent_s / 60:.1f} min {seconds:.2f} s/step "
            f"rate {self.rate():.2f} longest {self.mixer.longest} expert balance {balance:.2f} | "
            + " ".join(f"{task} {loss:.3f}" for task, loss in losses.items())
            + " | "
            + " ".join(f"{task} {score:.3f}" for task, score in scores.items()),
            flush=True,
        )
        self.save()

    def run(self) -> None:
        """Until the budget is spent. Time and learning rate move at reports only, where all processes agree."""
        self.net.train()
        sums: dict[str, float] = {}
        exported = time.time()
        while self.spent_s < self.args.minutes * 60:
            mark, begun = time.time(), self.step
            while self.step % self.args.report_every or self.step == begun:
                for task, loss in self.train_step().items():
                    sums[task] = sums.get(task, 0.0) + float(loss.detach())
                if self.step % 4 == 0 and not self.args.mtp_only:
                    for router in self.net.text.routers():
                        router.balance(0.02)
            num_steps = self.step - begun
            if self.args.rank == 0:
                seconds = time.time() - mark
                self.report(seconds / num_steps, {task: value / num_steps for task, value in sums.items()})
                self.spent_s += time.time() - mark
                if time.time() - exported > self.args.export_minutes * 60:
                    export(self.net)
                    exported = time.time()
            self.agree()
            sums = {}
        if self.args.rank == 0:
            self.save()
            export(self.net)

    def agree(self) -> None:
        """Every process takes the first one's time and curriculum."""
        if self.args.processes > 1:
            common = torch.tensor([self.spent_s, float(self.mixer.longest)], dtype=torch.float64)
            dist.broadcast(common, 0)
            self.spent_s, self.mixer.longest = float(common[0]), int(common[1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=75, help="wall-clock training time in all, earlier runs included"
    )
    parser.add_argument("--resume", action="store_true", help="continue from runs/nano.pt")
    parser.add_argument("--leave-out", nargs="*", default=[], help="tasks to skip for now")
    parser.add_argument("--load-towers", nargs="*", default=[], help="vision, audio: start from their warm-up runs")
    parser.add_argument("--start", type=Path, help="an earlier model's state to begin with, whatever its vocabulary")
    parser.add_argument("--start-tokenizer", type=Path, help="the tokenizer.json of that model")
    parser.add_argument("--longest", type=int, default=4, help="filler sentences of the recall task, with --start")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate of the trunk's matrices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report-every", type=int, default=100, help="steps between held-out scores")
    parser.add_argument("--held-out", type=int, default=64, help="held-out samples per task in a report")
    parser.add_argument("--mtp-every", type=int, default=3, help="steps between MTP updates; 0 leaves the heads alone")
    parser.add_argument("--export-minutes", type=float, default=8, help="minutes between exported checkpoints")
    parser.add_argument("--mtp-only", action="store_true", help="train the MTP heads on a frozen trunk")
    parser.add_argument("--processes", type=int, default=1, help="data-parallel processes; start each one")
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    if args.processes > 1:
        meeting = f"file://{(RUNS / 'meeting').resolve()}"
        dist.init_process_group("gloo", meeting, rank=args.rank, world_size=args.processes)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)
    Trainer(args).run()


if __name__ == "__main__":
    main()
