"""AdamW on fp32 master weights, its learning rate, and global-norm clipping.

The optimizer sees only the masters. Where the compute weights are a bf16 copy, each micro-batch's gradients are added to
the masters' fp32 gradients, so the sum does not depend on how the step was split beyond bf16 rounding of each part. Where weights are
divided over the ranks (sharding.py) it sees this rank's parts, and keeps moments for these alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_engine.contract.job import OptimizerConfig
from grpo_engine.ranks import Ranks
from grpo_engine.sharding import Sharding

STEP = "step"
"""AdamW's own count of updates of one weight: a number, the same for every part of it."""


def learning_rate_at(step: int, base: float, cfg: OptimizerConfig, num_steps: int) -> float:
    """Learning rate of `step` (from 1): linear warm-up that reaches `base` at step `warmup_steps`, then the schedule.

    `linear` and `cosine` fall from `base` right after the warm-up to 0 one step past the last, so every step learns.
    """
    if step <= cfg.warmup_steps:
        return base * step / cfg.warmup_steps
    if cfg.lr_schedule == "constant":
        return base
    done = (step - cfg.warmup_steps - 1) / max(1, num_steps - cfg.warmup_steps)
    factor = 1 - done if cfg.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return base * max(0.0, factor)


class Optimizer:
    """AdamW with named state, so that it can be saved as safetensors and restored exactly."""

    def __init__(self, masters: Mapping[str, Tensor], cfg: OptimizerConfig, sharding: Sharding | None = None) -> None:
        self.cfg = cfg
        self._sharding = sharding
        self._masters = dict(masters)
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=cfg.learning_rate,
            betas=(cfg.betas[0], cfg.betas[1]),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            fused=True,
        )

    def grad_norm(self) -> float:
        """Global L2 norm of the masters' gradients; non-finite when any of them is."""
        norm = float(torch.nn.utils.get_total_norm([master.grad for master in self._masters.values() if master.grad is not None]))
        return norm if self._sharding is None else math.sqrt(self._sharding.sum(norm * norm))

    def step(self, learning_rate: float, grad_norm: float) -> None:
        """Clip to `max_grad_norm` (given the norm already measured) and update the masters."""
        if self.cfg.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self.cfg.max_grad_norm, torch.tensor(grad_norm))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

    def share_gradients(self, ranks: Ranks) -> None:
        """Replace the gradients by their sum over the ranks. A master without a gradient on every rank stays without one."""
        if self._sharding is not None:  # summed in backward
            self._sharding.hand_over()
            return
        if ranks.size == 1:
            return
        has_gradient = torch.tensor([float(master.grad is not None) for master in self._masters.values()])
        ranks.add(has_gradient)
        shared = [master for master, count in zip(self._masters.values(), has_gradient.tolist(), strict=True) if count > 0]
        for master in shared:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        ranks.add_all([master.grad for master in shared if master.grad is not None])

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients gathered so far, which the masters then no longer hold."""
        taken = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        self.zero_grad()
        return taken

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[str, Tensor]) -> float:
        """Add gradients to those the masters hold. Returns the inner product of both."""
        product = 0.0
        for name, gradient in gradients.items():
            master = self._masters[name]
            if master.grad is None:
                master.grad = gradient
            else:
                product += float((master.grad.double() * gradient.double()).sum())
                master.grad += gradient
        return product if self._sharding is None else self._sharding.sum(product)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by `<parameter>|<key>`; empty before the first update.

        Where they are divided: whole copies on the first rank, on the others nothing of use.
        """
        own = {name: self._adamw.state[master] for name, master in self._masters.items() if master in self._adamw.state}
        if self._sharding is None:
            return {f"{name}|{key}": value for name, state in own.items() for key, value in state.items()}
        found = {f"{name}|{STEP}": state[STEP] for name, state in own.items()}
        for key in sorted({key for state in own.values() for key in state} - {STEP}):
            whole = self._sharding.gather({name: state[key] for name, state in own.items() if key in state})
            found |= {f"{name}|{key}": value for name, value in whole.items()}
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` gave. Raises KeyError when a parameter is unknown."""
        self._adamw.state.clear()
        for full_name, value in state.items():
            name, key = full_name.rsplit("|", 1)
            master = self._masters[name]
            part = value if self._sharding is None or key == STEP else self._sharding.own(name, value)
            self._adamw.state[master][key] = part.clone().to(master.device)
