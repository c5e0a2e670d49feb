"""Muon for the matrices inside the networks, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix; works on stacks `[..., rows, columns]`."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(torch.bfloat16)
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if flip else x).float()
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; step size scaled so that its RMS is that of Adam at the same learning rate."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                velocity = state["momentum"]
                velocity.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalise(torch.lerp(param.grad, velocity, group["momentum"]))
                scale = 0.2 * max(param.shape[-2:]) ** 0.5
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * scale)


def split_parameters(module: nn.Module, plain: tuple[str, ...] = ()) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices, rest); names that contain one of `plain` (embeddings, heads, routers) always go to the rest."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, param in module.named_parameters():
        inner = param.ndim >= 2 and not any(word in name for word in plain)
        (matrices if inner else rest).append(param)
    return matrices, rest


def build_optimisers(
    module: nn.Module, muon_lr: float, adam_lr: float, plain: tuple[str, ...] = ()
) -> list[torch.optim.Optimizer]:
    """The two optimisers of a network; each group remembers its peak rate under `peak`."""
    matrices, rest = split_parameters(module, plain)
    optimisers: list[torch.optim.Optimizer] = []
    if matrices:
        optimisers.append(Muon(matrices, lr=muon_lr, weight_decay=0.02))
    if rest:
        optimisers.append(torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak"] = group["lr"]
    return optimisers


def set_rate(optimisers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Scale every group's peak rate."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * factor
