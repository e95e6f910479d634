"""Everything a run holds in memory, and how it is captured into a resume state and restored from one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_engine.beta import BetaRule
from grpo_engine.checkpoint import ResumeState
from grpo_engine.commands import AppliedCommand, CommandInbox
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.dataset import Dataset
from grpo_engine.diagnostics import Detectors
from grpo_engine.evaluation import Evaluator
from grpo_engine.grader import GraderPool
from grpo_engine.guardrail import Guardrails
from grpo_engine.logprob import disable_branching
from grpo_engine.memory import Budget, sampling_budget, token_budget
from grpo_engine.optimizer import Optimizer, learning_rate_at
from grpo_engine.outcome import ConfigError, ReferenceMismatch
from grpo_engine.policy import Policy
from grpo_engine.ranks import Ranks
from grpo_engine.reference import Reference


@dataclass
class Learner:
    """The state of a run between two steps."""

    job_id: str
    epoch: int
    seed: int
    grpo: GrpoConfig
    policy: Policy
    reference: Reference | None
    dataset: Dataset
    grader: GraderPool
    optimizer: Optimizer
    rule: BetaRule
    detectors: Detectors
    inbox: CommandInbox
    base_learning_rate: float
    evaluator: Evaluator | None = None
    """Of the held-out file, when the job has one."""
    step: int = 0
    """Last completed step."""
    elapsed_s: float = 0.0
    """Seconds trained by earlier attempts up to the step resumed from."""
    reference_sha256: str | None = None
    """Of the reference as the run began with it."""
    grader_sha256: dict[str, str] = field(default_factory=dict)
    """Of the classifiers that grade, by their path in the spec."""
    num_reference_syncs: int = 0
    num_ungraded: int = 0
    """Steps in a row in which no completion could be graded."""
    shortcut_problem: str | None = None
    """Why the fast forward was switched off in step 1; kept, because an exact continuation must compute the same way."""
    readings: dict[str, float] = field(default_factory=dict)
    """Metrics of the last completed step."""
    guardrails: Guardrails = field(init=False)
    memory: Budget = field(init=False)
    """Of the reference's and the update's forwards."""
    sampling_memory: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.guardrails = Guardrails(self.grpo.guardrails)
        sampling, ranks = self.grpo.sampling, self.ranks
        self.memory = token_budget(self.grpo.resources.micro_batch_tokens, ranks.any)
        self.memory.is_final = self.policy.sharding is not None
        self.sampling_memory = sampling_budget(-(-sampling.prompts_per_step // ranks.size) * sampling.group_size, ranks.any)

    @property
    def ranks(self) -> Ranks:
        """The processes that share the run."""
        return self.policy.ranks

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.grpo.limits.num_steps

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step."""
        return learning_rate_at(step, self.base_learning_rate, self.grpo.optimizer, self.num_steps)

    def disable_branching(self, reason: str) -> None:
        """Send policy and reference through the plain forward from now on."""
        networks = [self.policy.network] if self.reference is None else [self.policy.network, self.reference.network]
        disable_branching(reason, *networks)
        self.shortcut_problem = reason

    @property
    def _must_keep_reference(self) -> bool:
        """Whether a resume state holds the reference: it has moved, or will and a rollback may have to undo that."""
        may_roll_back = any(rule.action.type == "rollback" for rule in self.grpo.guardrails)
        return self.num_reference_syncs > 0 or (may_roll_back and self.grpo.reference.sync_every is not None)

    def capture(self, elapsed_s: float) -> ResumeState:
        """Everything an exact continuation needs."""
        return ResumeState(
            step=self.step,
            weights=self.policy.weights(),
            optimizer=self.optimizer.state(),
            reference=self.reference.weights() if self.reference is not None and self._must_keep_reference else {},
            state={
                "beta": self.rule.state(),
                "cursor": self.dataset.cursor(),
                "rng": rng_state(),
                "detectors": self.detectors.state(),
                "guardrails": self.guardrails.state(),
                "seed": self.seed,
                "base_learning_rate": self.base_learning_rate,
                "commands": [record.to_json() for record in self.inbox.applied],
                "memory": self.memory.state(),
                "sampling_memory": self.sampling_memory.state(),
                "policy_sha256": self.policy.sha256,
                "reference_sha256": self.reference_sha256,
                "grader_sha256": self.grader_sha256,
                "num_reference_syncs": self.num_reference_syncs,
                "num_ungraded": self.num_ungraded,
                "synced_reference_sha256": self.reference.sha256 if self.reference is not None else None,
                "shortcut_problem": self.shortcut_problem,
                "readings": self.readings,
                "elapsed_s": elapsed_s,
            },
        )

    def restore(self, resume: ResumeState, replays: list[AppliedCommand]) -> None:
        """Continue from a resume state.

        Raises ReferenceMismatch when the reference is not the one the run began with, ConfigError for a state of another build.
        """
        try:
            self._restore(resume, replays)
        except KeyError as error:
            raise ConfigError(
                f"the resume state of step {resume.step} was written by another version of the engine: it lacks {error}; resume it "
                "with the version that wrote it, or start a new job from the newest published checkpoint"
            ) from error

    def _restore(self, resume: ResumeState, replays: list[AppliedCommand]) -> None:
        state = resume.state
        _same_weights("reference", self.reference_sha256, state["reference_sha256"])
        for path, began_with in state["grader_sha256"].items():
            _same_weights(f"classifier of {path}", self.grader_sha256.get(path), began_with, param=f"{path}.model")
        if self.policy.adapter is not None:
            _same_weights("base model", self.policy.sha256, state["policy_sha256"])
        self.policy.load_weights(resume.weights)
        self.optimizer.load(resume.optimizer)
        if self.reference is not None and resume.reference:
            self.reference.load_weights(resume.reference, state["synced_reference_sha256"])
        if state["shortcut_problem"] is not None:
            self.disable_branching(state["shortcut_problem"])
        self.rule.load(state["beta"])
        self.dataset.seek(state["cursor"])
        self.detectors.load(state["detectors"])
        self.guardrails.load(state["guardrails"])
        self.memory.load(state["memory"])
        self.sampling_memory.load(state["sampling_memory"])
        self.seed = state["seed"]
        self.base_learning_rate = state["base_learning_rate"]
        self.inbox.load([AppliedCommand.from_json(record) for record in state["commands"]], replays)
        self.num_reference_syncs = state["num_reference_syncs"]
        self.num_ungraded = state["num_ungraded"]
        self.readings = state["readings"]
        self.elapsed_s = state["elapsed_s"]
        self.step = resume.step
        restore_rng(state["rng"])


def _same_weights(what: str, found: str | None, began_with: str | None, param: str = "model") -> None:
    """Raises ReferenceMismatch when both are known and differ."""
    if found is not None and began_with is not None and found != began_with:
        raise ReferenceMismatch(
            f"the {what} has SHA-256 {found[:12]}..., the run began with {began_with[:12]}...: "
            "the model has changed; restore the one it began with, or start a new job",
            param=param,
        )


def rng_state() -> dict[str, Any]:
    """The state of every random generator of the process, as JSON. Sampling is keyed by step and needs none of them."""
    version, numbers, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in cuda],
        "python": [version, list(numbers), gauss],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """The inverse of `rng_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_bytes_tensor(text) for text in state["cuda"]])


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
