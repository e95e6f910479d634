"""The updates of one step: masks and denominators once, then forward, loss and backward in micro-batches.

Every denominator covers the whole step, so that the sum over micro-batches is the whole-batch gradient however the step
is cut, over micro-batches and over ranks. Each rank differentiates the rows of its own groups; the sums, the gradients and the
per-token tensors are then added up, so that every rank holds the whole step's.

Shapes as in batch.py: P prompts, G completions of each, B = P * G rows, T completion tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from grpo_engine.advantage import Advantages
from grpo_engine.batch import Rollout
from grpo_engine.contract.aggregation import kl_aggregation, loss_aggregation
from grpo_engine.contract.kl import Direction
from grpo_engine.device import release_cache
from grpo_engine.kl import ExactKl, KlTokens, kl_loss_tokens, kl_penalty
from grpo_engine.learner import Learner
from grpo_engine.logprob import MicroBatch, TokenStats, rollout_stats, token_stats
from grpo_engine.loss import Normaliser, PolicyTokens, aggregate, policy_loss_tokens
from grpo_engine.network import Network
from grpo_engine.reference import Reference
from grpo_engine.sharding import IDLE
from grpo_engine.shares import own_rows, split_again, split_own
from grpo_engine.step_metrics import Metrics, StepTensors
from grpo_engine.update_metrics import first_metrics, ratio_metrics
from grpo_engine.vocabulary import ReferenceStates

Term = Literal["both", "policy", "kl"]
"""What is differentiated: the whole loss, or one of its two terms alone."""


@dataclass
class Update:
    """Inputs of the step's updates, fixed for the whole step, and the tensors they fill."""

    batches: list[MicroBatch]
    """Of this rank; none when there are fewer groups than ranks."""
    tensors: StepTensors
    advantage: Tensor
    """(B), or (B, T) with a KL penalty inside."""
    policy_mask_BT: Tensor
    kl_mask_BT: Tensor
    policy_normaliser: Normaliser
    kl_normaliser: Normaliser
    beta: float
    micro_batch_tokens: int
    """The token budget `batches` were split by."""
    own_B: Tensor
    """True for the rows of this rank, which alone are in `batches`."""
    num_idle: int
    """How many micro-batches more another rank has, where every forward is an act of all (sharding.py)."""
    reference_states: list[ReferenceStates] | None = None
    """The reference's final hidden states by micro-batch, for exact KL."""
    policy_sum: float = 0.0
    """The policy term of the update now running ..."""
    kl_sum: float = 0.0
    """... and its KL term, before beta."""


def prepare_update(learner: Learner, rollout: Rollout, advantages: Advantages, beta: float) -> Update:
    """Reference log-probabilities, masks and denominators of the step.

    With the KL penalty in the reward or advantage, one more forward of the policy gives the old log-probabilities the
    penalty is made of; otherwise they come from the first update's own forward. When memory runs out it is done again with a
    smaller split (memory.py).
    """
    update = learner.memory.fit(lambda: _prepare(learner, rollout, advantages, beta), "the reference's forward", release_cache)
    _share_tensors(learner, update)
    tensors, kl = update.tensors, learner.grpo.kl
    if tensors.ref_logprob_BT is not None and kl.placement != "loss":
        penalty = kl_penalty(tensors.old_logprob_BT, tensors.ref_logprob_BT, update.kl_mask_BT, kl)
        update.advantage = update.advantage[:, None] - beta * penalty.penalty_BT
        tensors.kl_clipped_BT = penalty.clipped_BT.double()
    return update


def _prepare(learner: Learner, rollout: Rollout, advantages: Advantages, beta: float) -> Update:
    grpo, policy = learner.grpo, learner.policy
    limit, device = grpo.sampling.max_completion_tokens, policy.network.device
    own = own_rows(learner.ranks, rollout)
    mask_BT = rollout.completion_mask_BT(device).double()
    tensors = StepTensors.create(mask_BT, rollout.sampler_logprob_BT(device).double())
    policy_mask_BT = mask_BT * advantages.policy_keep_PG.reshape(-1, 1).to(mask_BT)
    kl_mask_BT = mask_BT * advantages.kl_keep_PG.reshape(-1, 1).to(mask_BT)
    batches = split_own(rollout.rows, own, learner.memory.size, policy.network.is_branched)
    update = Update(
        batches=batches,
        tensors=tensors,
        advantage=advantages.advantage_PG.flatten().to(device),
        policy_mask_BT=policy_mask_BT,
        kl_mask_BT=kl_mask_BT,
        policy_normaliser=Normaliser.create(policy_mask_BT, loss_aggregation(grpo.loss), limit),
        kl_normaliser=Normaliser.create(kl_mask_BT, kl_aggregation(grpo.kl, grpo.loss), limit),
        beta=beta,
        micro_batch_tokens=learner.memory.size,
        own_B=torch.tensor([row in own for row in range(len(mask_BT))], device=device),
        num_idle=learner.ranks.largest(len(batches)) - len(batches) if policy.sharding is not None else 0,
    )
    if learner.reference is None:
        return update
    _refer(learner, learner.reference, update)
    if grpo.kl.placement != "loss":
        if update.batches:
            old, _ = rollout_stats(policy.network, update.batches, temperature=grpo.sampling.temperature, pad_id=policy.pad_id)
            _keep(tensors.old_logprob_BT, update, old)
        _idle(policy.network, update)
    return update


@torch.no_grad()
def _idle(network: Network, update: Update) -> None:
    """Forwards beside those of ranks that have more micro-batches."""
    for _ in range(update.num_idle):
        token_stats(network, IDLE, temperature=1.0, pad_id=0)


def _keep(into_BT: Tensor, update: Update, stats: TokenStats) -> None:
    """Put the log-probabilities of this rank's rows in their place."""
    into_BT[update.own_B, : stats.logprob_BT.shape[1]] = stats.logprob_BT.double()


def _share_tensors(learner: Learner, update: Update) -> None:
    """Give every rank the tensors of all rows. Each row was computed by one rank, so that nothing is rounded."""
    if learner.ranks.size == 1:
        return
    found = [value for value in vars(update.tensors).values() if value is not None]
    for tensor in found[2:]:  # after the mask and the sampler's, which every rank has
        tensor[~update.own_B] = 0.0
    learner.ranks.add_all(found[2:])


def _refer(learner: Learner, reference: Reference, update: Update) -> None:
    """The reference's log-probabilities, and for exact KL its states, in the update's own split: equal weights give equal bits."""
    grpo, policy, tensors = learner.grpo, learner.policy, update.tensors
    is_exact = grpo.kl.estimator == "exact" or grpo.telemetry.exact_kl
    tensors.ref_logprob_BT = torch.zeros_like(tensors.mask_BT)
    if is_exact:
        update.reference_states, tensors.exact_kl_BT = [], torch.zeros_like(tensors.mask_BT)
    if update.batches:
        stats, states = rollout_stats(
            reference.network, update.batches, temperature=grpo.sampling.temperature, pad_id=policy.pad_id, keep_states=is_exact
        )
        _keep(tensors.ref_logprob_BT, update, stats)
        if is_exact:
            update.reference_states = states
    _idle(reference.network, update)


def optimize(learner: Learner, update: Update, learning_rate: float, metrics: Metrics, *, should_split: bool = False) -> str | None:
    """All updates of the step, into the weights. Fills `metrics`.

    `should_split` measures the gradients of the two terms apart in the first update. Returns None, or why an update was
    not applied: then its gradients are gone and the weights are those before it.
    """
    for iteration in range(learner.grpo.loss.num_iterations):
        if iteration == 0 and should_split:
            metrics |= _split_backward(learner, update)
        else:
            _differentiate(learner, update, iteration)
        grad_norm = _grad_norm(learner)
        if iteration == 0:
            metrics |= first_metrics(update, learner.grpo.kl.direction)
            metrics["grad_norm/total"] = grad_norm
        metrics |= ratio_metrics(update)
        total = update.policy_sum + update.beta * update.kl_sum if update.beta > 0 else update.policy_sum
        if not (math.isfinite(total) and math.isfinite(grad_norm)):
            learner.optimizer.zero_grad()
            return f"{'the gradient' if math.isfinite(total) else 'the loss'} of update {iteration + 1} is not finite"
        learner.optimizer.step(learning_rate, grad_norm)
        learner.policy.refresh()
    learner.optimizer.zero_grad()
    return None


def _grad_norm(learner: Learner) -> float:
    norm = learner.optimizer.grad_norm()
    return learner.ranks.first(lambda: norm)


def _differentiate(learner: Learner, update: Update, iteration: int, term: Term = "both") -> None:
    """The whole step's gradient, sums and tensors of one update, on every rank."""
    work = partial(_differentiate_own, learner, update, iteration, term)
    learner.memory.fit(work, f"update {iteration + 1} of a step", release_cache)
    learner.optimizer.share_gradients(learner.ranks)
    sums = torch.tensor([update.policy_sum, update.kl_sum], dtype=torch.float64)
    learner.ranks.add(sums)
    update.policy_sum, update.kl_sum = sums.tolist()
    _share_tensors(learner, update)


def _differentiate_own(learner: Learner, update: Update, iteration: int, term: Term) -> None:
    """The gradient of this rank's rows, from nothing; in a new split when the token budget has changed."""
    learner.optimizer.zero_grad()
    if update.micro_batch_tokens != learner.memory.size:
        update.micro_batch_tokens = learner.memory.size
        update.batches = split_again(update.batches, learner.memory.size, learner.policy.network.is_branched)
        if learner.reference is not None:
            _refer(learner, learner.reference, update)
    run_batches(learner, update, is_first=iteration == 0, term=term)


def run_batches(learner: Learner, update: Update, *, is_first: bool, term: Term = "both") -> None:
    """Forward and backward of every micro-batch; the gradients of `term` add up in the masters."""
    update.policy_sum = update.kl_sum = 0.0
    for number in range(len(update.batches)):
        forward_backward(learner, update, number, is_first=is_first, term=term)
    for _ in range(update.num_idle):
        nothing = token_stats(learner.policy.network, IDLE, temperature=1.0, pad_id=0).logprob_BT.sum() * 0.0
        nothing.backward()  # type: ignore[no-untyped-call]


def _split_backward(learner: Learner, update: Update) -> Metrics:
    """The first update's gradient as the sum of its two terms, each measured alone (the KL term with beta)."""
    _differentiate(learner, update, 0, "policy")
    policy_norm, policy = learner.optimizer.grad_norm(), learner.optimizer.take_gradients()
    _differentiate(learner, update, 0, "kl")
    kl_norm, product = learner.optimizer.grad_norm(), learner.optimizer.add_gradients(policy)
    metrics = {"grad_norm/policy": policy_norm, "grad_norm/kl": kl_norm}
    if policy_norm > 0 and kl_norm > 0:
        metrics["grad_cosine/policy_kl"] = product / (policy_norm * kl_norm)
    return metrics


def forward_backward(learner: Learner, update: Update, number: int, *, is_first: bool, term: Term = "both") -> None:
    """One micro-batch: its share of the step's loss, differentiated into the masters' gradients."""
    grpo, tensors = learner.grpo, update.tensors
    batch = update.batches[number]
    states = update.reference_states if is_first or grpo.kl.estimator == "exact" else None
    rows = torch.tensor(batch.index, device=tensors.mask_BT.device)
    stats = token_stats(
        learner.policy.network,
        batch,
        temperature=grpo.sampling.temperature,
        pad_id=learner.policy.pad_id,
        width=tensors.mask_BT.shape[1],
        reference=None if states is None else states[number],
    )
    tensors.logprob_BT[rows] = stats.logprob_BT.detach().double()
    if is_first:
        tensors.old_logprob_BT[rows] = tensors.logprob_BT[rows]
        tensors.entropy_BT[rows] = stats.entropy_BT.detach().double()
        _keep_exact(tensors, rows, stats, grpo.kl.direction)
    policy = policy_loss_tokens(
        stats.logprob_BT, tensors.old_logprob_BT[rows], update.advantage[rows], update.policy_mask_BT[rows], grpo.loss
    )
    _keep_policy(tensors, rows, policy)
    loss = aggregate(policy.loss_BT, update.policy_mask_BT[rows], update.policy_normaliser)
    update.policy_sum += float(loss.detach())
    if tensors.ref_logprob_BT is not None and grpo.kl.placement == "loss":
        kl = _kl_tokens(learner, update, rows, stats, is_first=is_first)
        kl_term = aggregate(kl.surrogate_BT, update.kl_mask_BT[rows], update.kl_normaliser)
        update.kl_sum += float(kl_term.detach())
        if term == "kl":
            loss = update.beta * kl_term
        elif term == "both" and update.beta > 0:
            loss = loss + update.beta * kl_term
    loss.backward()  # type: ignore[no-untyped-call]


def _keep_exact(tensors: StepTensors, rows: Tensor, stats: TokenStats, direction: Direction) -> None:
    exact_BT = _exact(stats, direction)
    if exact_BT is not None and tensors.exact_kl_BT is not None:
        tensors.exact_kl_BT[rows] = exact_BT.detach().double()


def _kl_tokens(learner: Learner, update: Update, rows: Tensor, stats: TokenStats, *, is_first: bool) -> KlTokens:
    tensors, cfg = update.tensors, learner.grpo.kl
    assert tensors.ref_logprob_BT is not None
    exact_BT = _exact(stats, cfg.direction) if cfg.estimator == "exact" else None
    kl = kl_loss_tokens(
        stats.logprob_BT,
        tensors.ref_logprob_BT[rows],
        tensors.old_logprob_BT[rows],
        tensors.sampler_logprob_BT[rows],
        update.kl_mask_BT[rows],
        cfg,
        None if exact_BT is None else ExactKl(exact_BT),
    )
    if is_first:
        tensors.kl_clipped_BT[rows] = kl.clipped_BT.double()
    return kl


def _exact(stats: TokenStats, direction: Direction) -> Tensor | None:
    if stats.exact_policy_ref_BT is None or stats.exact_ref_policy_BT is None:
        return None
    match direction:
        case "policy_ref":
            return stats.exact_policy_ref_BT
        case "ref_policy":
            return stats.exact_ref_policy_BT
        case "jeffreys":
            return stats.exact_policy_ref_BT + stats.exact_ref_policy_BT


def _keep_policy(tensors: StepTensors, rows: Tensor, policy: PolicyTokens) -> None:
    tensors.ratio_BT[rows] = policy.ratio_BT.double()
    tensors.clipped_low_BT[rows] = policy.clipped_low_BT.double()
    tensors.clipped_high_BT[rows] = policy.clipped_high_BT.double()
