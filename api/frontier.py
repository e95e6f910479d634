"""What reward checkpoints bought for how much KL."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_engine.contract.study_view import FrontierPoint
from jobs.ledger.records import CheckpointRecord


def frontier(saved: Sequence[CheckpointRecord]) -> list[FrontierPoint]:
    """All checkpoints by ascending KL, the undominated ones marked."""
    measured = [record for record in saved if record.ref_kl is not None and record.reward is not None]
    best: set[str] = set()
    highest, at_kl = float("-inf"), float("-inf")
    for record in sorted(measured, key=lambda one: (one.ref_kl or 0.0, -(one.reward or 0.0))):
        kl, reward = record.ref_kl or 0.0, record.reward or 0.0
        if reward > highest or (reward, kl) == (highest, at_kl):
            highest, at_kl = reward, kl
            best.add(record.id)
    points = [
        FrontierPoint(
            checkpoint_id=record.id, job_id=record.job_id, step=record.step, ref_kl=record.ref_kl, reward=record.reward,
            beta=record.beta, is_on_frontier=record.id in best,
        )
        for record in saved
    ]  # fmt: skip
    return sorted(points, key=lambda point: (point.ref_kl is None, point.ref_kl or 0.0, -(point.reward or 0.0), point.checkpoint_id))


def best_of(points: Sequence[FrontierPoint]) -> FrontierPoint | None:
    """The undominated point with the highest reward; None when nothing is measured."""
    good = [point for point in points if point.is_on_frontier]
    return max(good, key=lambda point: point.reward or 0.0, default=None)
