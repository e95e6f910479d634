"""What the server says about an accepted job's settings: warnings, and in words which divergence its KL is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from grpo_engine.contract.advice import advise
from grpo_engine.contract.job import JobSpec
from grpo_engine.contract.kl import DIVERGENCES, KlConfig
from grpo_engine.contract.view import JobWarning


def warnings_about(spec: JobSpec) -> list[JobWarning]:
    """What `advise` says of the resolved job."""
    return [JobWarning(code=advice.code, param=advice.param, message=advice.message) for advice in advise(spec.method.grpo)]


@dataclass(frozen=True)
class Remarks:
    """What the server says about a stored job's settings."""

    warnings: list[JobWarning]
    divergence: str


@lru_cache(maxsize=2048)
def remarks_on(spec_json: str) -> Remarks:
    """Of a stored job; remembered, since lists show the same jobs again and again."""
    spec = JobSpec.model_validate_json(spec_json)
    return Remarks(warnings_about(spec), divergence_in_words(spec.method.grpo.kl))


def divergence_in_words(kl: KlConfig) -> str:
    """What the job calls KL: which divergence, how it is estimated, and how it enters training."""
    names = {"policy_ref": "reverse KL", "ref_policy": "forward KL", "jeffreys": "both directions"}
    how = "summed over the whole vocabulary" if kl.estimator == "exact" else f"estimated by {kl.estimator} on the sampled tokens"
    where = f"in the loss with its {kl.grad} gradient" if kl.placement == "loss" else f"subtracted from the {kl.placement}"
    return f"{DIVERGENCES[kl.direction]} ({names[kl.direction]}), {how}, nats per token; {where}"
