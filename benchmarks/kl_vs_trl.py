"""Our losses and KL terms against TRL's own `GRPOTrainer._compute_loss`, on the same log-probabilities: values and gradients.

    python benchmarks/kl_vs_trl.py [--trl-python PATH]

TRL (`pip install '.[bench]'`) may live in another virtual environment. Its loss is called on a stand-in trainer whose
forward returns the given log-probabilities, so nothing but the arithmetic is compared. Exits 1 when anything differs by
more than 1e-6. TRL's sequence-level weight on the KL (its issue 6586) is not ours, so gspo is compared without KL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TOLERANCE = 1e-6
LIMIT = 9
"""Completion tokens allowed: the constant denominator of dr_grpo."""
CASES: list[dict[str, Any]] = [
    *[
        {"type": kind, "beta": 0.3, "is_unbiased": is_unbiased, "is_on_policy": is_on_policy}
        for kind in ("grpo", "dr_grpo", "dapo", "bnpo")
        for is_unbiased in (False, True)
        for is_on_policy in (False, True)
    ],
    {"type": "gspo", "beta": 0.0, "is_unbiased": True, "is_on_policy": False},
    {"type": "cispo", "beta": 0.3, "is_unbiased": True, "is_on_policy": False},
]


def batch() -> dict[str, torch.Tensor]:
    """Six completions of one to seven tokens; float64."""
    draw = torch.Generator().manual_seed(20)
    logprob, ref, noise = (torch.rand(6, 7, generator=draw, dtype=torch.float64) for _ in range(3))
    lengths = torch.tensor([1, 7, 3, 5, 7, 2])
    return {
        "logprob": -3 * logprob,
        "ref": -3 * ref,
        "old": -3 * logprob + 0.6 * (noise - 0.5),
        "mask": (torch.arange(7) < lengths[:, None]).double(),
        "advantage": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.9, -0.3], dtype=torch.float64),
    }


def ours(case: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient by this product."""
    from grpo_engine.contract.aggregation import kl_aggregation, loss_aggregation
    from grpo_engine.contract.job import LossConfig
    from grpo_engine.contract.kl import KlConfig
    from grpo_engine.kl import kl_loss_tokens
    from grpo_engine.loss import Normaliser, aggregate, policy_loss_tokens

    data = batch()
    logprob = data["logprob"].requires_grad_()
    old = logprob.detach() if case["is_on_policy"] else data["old"]
    wide = {"epsilon": 100.0, "epsilon_high": 0.2} if case["type"] == "cispo" else {}
    cfg = LossConfig(type=case["type"], **wide)
    kl = KlConfig(
        grad="unbiased" if case["is_unbiased"] else "naive", importance="old" if case["is_unbiased"] else "none", log_ratio_clip=None
    )
    policy = policy_loss_tokens(logprob, old, data["advantage"], data["mask"], cfg)
    loss = aggregate(policy.loss_BT, data["mask"], Normaliser.create(data["mask"], loss_aggregation(cfg), LIMIT))
    term = kl_loss_tokens(logprob, data["ref"], old, None, data["mask"], kl)
    normaliser = Normaliser.create(data["mask"], kl_aggregation(kl, cfg), LIMIT)
    loss = loss + case["beta"] * aggregate(term.surrogate_BT, data["mask"], normaliser)
    loss.backward()
    return {"loss": loss.item(), "gradient": logprob.grad.tolist()}


def theirs(case: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient by TRL."""
    from trl import GRPOTrainer

    data = batch()
    logprob = data["logprob"].requires_grad_()
    is_sequence = case["type"] == "gspo"
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_args, **_kwargs: (logprob, torch.ones_like(logprob), None),
        _metrics={"train": {name: [] for name in _METRICS}},
        _entropy_bonus_enabled=False,
        accelerator=accelerator,
        args=SimpleNamespace(use_bias_correction_kl=case["is_unbiased"], delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=case["beta"],
        current_gradient_accumulation_steps=1,
        epsilon_high=1.2 if case["type"] == "cispo" else 0.2,
        epsilon_low=0.2,
        importance_sampling_level="sequence" if is_sequence else "token",
        loss_type="grpo" if is_sequence else case["type"],
        max_completion_length=LIMIT,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    ids = torch.zeros(6, 7, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": ids, "completion_mask": data["mask"],
        "advantages": data["advantage"], "ref_per_token_logps": data["ref"], "num_items_in_batch": data["mask"].sum(),
        **({} if case["is_on_policy"] else {"old_per_token_logps": data["old"]}),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    return {"loss": loss.item(), "gradient": logprob.grad.tolist()}


_METRICS = (
    "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max",
    "clip_ratio/region_mean", "cispo_clip_ratio", "policy_loss",
)  # fmt: skip


def main() -> int:
    """Compare, print a table, and say by the exit code whether everything agrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that has TRL")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer is not None:
        args.answer.write_text(json.dumps([theirs(case) for case in CASES]))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "trl.json"
        subprocess.run([args.trl_python, __file__, "--answer", str(answer)], check=True)
        others = json.loads(answer.read_text())
    worst = 0.0
    print(f"{'loss':8} {'KL gradient':12} {'policy':11} {'value':>10} {'gradient':>10}   (largest difference)")
    for case, other in zip(CASES, others, strict=True):
        own = ours(case)
        value = abs(own["loss"] - other["loss"])
        pair = [torch.tensor(side["gradient"], dtype=torch.float64) for side in (own, other)]
        gradient = float((pair[0] - pair[1]).abs().max())
        worst = max(worst, value, gradient)
        form = "none" if case["beta"] == 0 else "unbiased" if case["is_unbiased"] else "naive"
        print(f"{case['type']:8} {form:12} {'on' if case['is_on_policy'] else 'off'}-policy {value:13.1e} {gradient:10.1e}")
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
