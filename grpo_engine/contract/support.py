"""What the contract describes and this build's engine does not yet carry out: refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_engine.contract.error import NotImplementedYet
from grpo_engine.contract.grader import unsupported_graders
from grpo_engine.contract.job import JobSpec


def refuse_unsupported(spec: JobSpec) -> None:
    """Raise NotImplementedYet for the first setting the engine does not carry out."""
    for param, remedy in _unsupported(spec):
        raise NotImplementedYet(f"{param} is not implemented in this version; {remedy}", param=param)


def _unsupported(spec: JobSpec) -> Iterator[tuple[str, str]]:
    grpo, at = spec.method.grpo, "method.grpo"
    if grpo.adapter is not None:
        yield f"{at}.adapter", "remove it to train all weights"
    if grpo.environment is not None:
        yield f"{at}.environment", "give a training_file and a grader"
    if grpo.evaluation is not None:
        yield f"{at}.evaluation", "remove it"
    if grpo.reference.source != "initial":
        yield f"{at}.reference.source", "set it to initial: the weights the job starts from"
    if grpo.resources.gpus > 1:
        yield f"{at}.resources.gpus", "use 0 or 1"
    if grpo.loss.dynamic_sampling:
        yield f"{at}.loss.dynamic_sampling", "set it to false"
    if spec.validation_file is not None:
        yield "validation_file", "remove it"
    if grpo.grader is not None:
        yield from unsupported_graders(grpo.grader, f"{at}.grader")
