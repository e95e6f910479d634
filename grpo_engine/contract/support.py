"""What the contract describes and this build's engine does not yet carry out: refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_engine.contract.error import NotImplementedYet
from grpo_engine.contract.grader import unsupported_graders
from grpo_engine.contract.job import JobSpec
from grpo_engine.contract.resources import Resources


def refuse_unsupported(spec: JobSpec) -> None:
    """Raise NotImplementedYet for the first setting the engine does not carry out."""
    for param, remedy in _unsupported(spec):
        raise NotImplementedYet(f"{param} is not implemented in this version; {remedy}", param=param)


def _unsupported(spec: JobSpec) -> Iterator[tuple[str, str]]:
    grpo, at = spec.method.grpo, "method.grpo"
    if grpo.reference.source == "base" and grpo.adapter is None:
        yield f"{at}.reference.source", "set it to initial: without an adapter these are the weights the job starts from"
    if grpo.resources.num_ranks == 1 and grpo.resources.rank_timeout_s != Resources.model_fields["rank_timeout_s"].default:
        yield f"{at}.resources.rank_timeout_s", "leave it out: a job has one process"
    if grpo.grader is not None:
        yield from unsupported_graders(grpo.grader, f"{at}.grader")
    if grpo.evaluation is not None and grpo.evaluation.grader is not None:
        yield from unsupported_graders(grpo.evaluation.grader, f"{at}.evaluation.grader")
