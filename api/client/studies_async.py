"""The newer half of the asynchronous client's calls; `AsyncGrpo` inherits them. See `api.client.studies`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from api.client import calls
from api.client.calls import Call, CheckedGrader
from api.client.transport import Answer
from grpo_engine.contract.presets import PresetCard
from grpo_engine.contract.rollout import RolloutPage
from grpo_engine.contract.study_view import Comparison, GuardrailReplay
from grpo_engine.contract.sweep_view import Sweep
from grpo_engine.contract.view import Checkpoint, Deleted, File, GraderRun, Integrity, Job, JobOutcome, Page, Validated
from grpo_engine.contract.webhook_view import (
    EventType,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEndpointDeleted,
    WebhookEndpointWithSecret,
    WebhookTestResult,
)


class AsyncStudies(ABC):
    """Validation, forks, studies, promotion, sweeps, graders and webhooks, asynchronously."""

    @abstractmethod
    async def send(self, call: Call[Answer]) -> Answer:
        """Send one request and read its answer. Raises ApiError, ServerUnreachable, UnknownAnswer, CannotSend."""

    # Jobs

    async def create_job_by_key(self, key: str, spec: Mapping[str, Any]) -> Job:
        """The job of this key: made now, or the first one with the same key and spec. Raises ApiError `idempotency_key_reused`."""
        return await self.send(calls.create_by_key(key, spec))

    async def validate(self, spec: Mapping[str, Any], *, probe: bool = False) -> Validated:
        """Every check of a create and the resolved job; creates nothing. `probe` runs its first step on a worker, for its numbers alone."""
        return await self.send(calls.validate(spec, probe=probe))

    async def outcome(self, job_id: str) -> JobOutcome:
        """How the job ended. Raises ApiError `job_not_finished` until it has."""
        return await self.send(calls.outcome(job_id))

    async def fork(
        self,
        job_id: str,
        *,
        checkpoint: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        suffix: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """A new job from a published checkpoint (the newest) with the job's settings but for `overrides`."""
        return await self.send(calls.fork(job_id, checkpoint, overrides, suffix, idempotency_key))

    async def compare(
        self, job_ids: Sequence[str], names: Sequence[str] | None = None, *, align: Literal["step", "kl"] = "step", limit: int | None = None
    ) -> Comparison:
        """Curves of up to 20 jobs by step or by KL, and the reward-KL frontier over their checkpoints."""
        return await self.send(calls.compare(job_ids, names, align, limit))

    async def rollouts(self, job_id: str, *, step: int | None = None, after: int | None = None, limit: int | None = None) -> RolloutPage:
        """Completions of a step (the latest kept) with their rewards and KL, in order of `index`; `after` is an index."""
        return await self.send(calls.rollouts(job_id, step, after, limit))

    async def integrity(self, job_id: str) -> Integrity:
        """Missing and re-measured steps, gaps, and how far the database is behind."""
        return await self.send(calls.integrity(job_id))

    async def replay_guardrails(
        self, job_id: str, *, diagnostics: Mapping[str, Any] | None = None, guardrails: Sequence[Mapping[str, Any]] | None = None
    ) -> GuardrailReplay:
        """A dry run of detectors and guardrails over what the job has measured; what is left out is the job's own."""
        return await self.send(calls.replay_guardrails(job_id, diagnostics, guardrails))

    # Checkpoints

    async def pin(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        """Keep the checkpoint whatever `checkpoints.keep` says."""
        return await self.send(calls.mark(job_id, checkpoint_id, "pin", is_set=True))

    async def unpin(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        """Leave it to retention again."""
        return await self.send(calls.mark(job_id, checkpoint_id, "pin", is_set=False))

    async def promote(self, job_id: str, checkpoint_id: str, gates: Mapping[str, float], *, note: str | None = None) -> Checkpoint:
        """Promote it if it passes every gate: max_ref_kl, min_reward, max_beta, min_step. Raises ApiError `gate_failed`."""
        return await self.send(calls.promote(job_id, checkpoint_id, gates, note))

    async def withdraw_promotion(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        """Withdraw the promotion; the checkpoint stays pinned."""
        return await self.send(calls.mark(job_id, checkpoint_id, "promote", is_set=False))

    async def delete_checkpoint(self, job_id: str, checkpoint_id: str) -> Deleted:
        """Remove a published checkpoint for good. Raises ApiError `conflict` while it is pinned."""
        return await self.send(calls.delete_checkpoint(job_id, checkpoint_id))

    # Files, presets

    async def file(self, file_id: str) -> File:
        """One uploaded file."""
        return await self.send(calls.file(file_id))

    async def presets(self) -> list[PresetCard]:
        """Named defaults of `method.grpo`, with their sources."""
        return (await self.send(calls.presets())).data

    # Sweeps

    async def create_sweep(self, request: Mapping[str, Any], *, idempotency_key: str | None = None) -> Sweep:
        """2 to 20 jobs from one base: `{"spec": {...}, "variants": [{"beta": 0.02}, ...]}`; all of them or none."""
        return await self.send(calls.create_sweep(request, idempotency_key))

    async def sweeps(self, *, limit: int = 20, after: str | None = None) -> Page[Sweep]:
        """A page of sweeps, newest first."""
        return await self.send(calls.sweeps(limit, after))

    async def sweep(self, sweep_id: str) -> Sweep:
        """Where each member is, and the frontier over all their checkpoints."""
        return await self.send(calls.sweep(sweep_id))

    async def cancel_sweep(self, sweep_id: str) -> Sweep:
        """Cancel every member that has not ended."""
        return await self.send(calls.steer_sweep(sweep_id, "cancel"))

    async def pause_sweep(self, sweep_id: str) -> Sweep:
        """Pause every member that can be paused."""
        return await self.send(calls.steer_sweep(sweep_id, "pause"))

    async def resume_sweep(self, sweep_id: str) -> Sweep:
        """Queue every paused member again."""
        return await self.send(calls.steer_sweep(sweep_id, "resume"))

    # Graders

    async def run_grader(self, grader: Mapping[str, Any], model_sample: str, item: Mapping[str, Any] | None = None) -> GraderRun:
        """Score one sample."""
        return await self.send(calls.run_grader(grader, model_sample, item))

    async def check_grader(self, grader: Mapping[str, Any]) -> CheckedGrader:
        """Check a grader and fill in its defaults."""
        return await self.send(calls.check_grader(grader))

    # Webhooks

    async def create_webhook(self, name: str, url: str, event_types: Sequence[EventType]) -> WebhookEndpointWithSecret:
        """A new subscriber; the answer holds its signing secret, this once."""
        return await self.send(calls.create_webhook(name, url, event_types))

    async def webhooks(self, *, limit: int = 20, after: str | None = None) -> Page[WebhookEndpoint]:
        """A page of subscribers, newest first."""
        return await self.send(calls.webhooks(limit, after))

    async def webhook(self, endpoint_id: str) -> WebhookEndpoint:
        """One subscriber."""
        return await self.send(calls.webhook(endpoint_id))

    async def change_webhook(
        self, endpoint_id: str, *, name: str | None = None, url: str | None = None, event_types: Sequence[EventType] | None = None
    ) -> WebhookEndpoint:
        """Change name, url or the whole set of event types."""
        return await self.send(calls.change_webhook(endpoint_id, name, url, event_types))

    async def delete_webhook(self, endpoint_id: str) -> WebhookEndpointDeleted:
        """Tell it nothing more."""
        return await self.send(calls.delete_webhook(endpoint_id))

    async def rotate_webhook_secret(self, endpoint_id: str, *, keep_old: bool = False) -> WebhookEndpointWithSecret:
        """A new secret, shown this once; `keep_old` lets the old one sign as well for 24 hours."""
        return await self.send(calls.rotate_webhook_secret(endpoint_id, keep_old))

    async def test_webhook(self, endpoint_id: str, event_type: EventType) -> WebhookTestResult:
        """Send a signed sample now. Raises ApiError `subscriber_unreachable`."""
        return await self.send(calls.test_webhook(endpoint_id, event_type))

    async def deliveries(
        self,
        endpoint_id: str,
        *,
        status: Literal["pending", "delivered", "failed"] | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> Page[WebhookDelivery]:
        """What was sent to it, newest first."""
        return await self.send(calls.deliveries(endpoint_id, status, limit, after))

    async def redeliver(self, endpoint_id: str, delivery_id: str) -> WebhookDelivery:
        """Send a delivery again, with the same event id."""
        return await self.send(calls.redeliver(endpoint_id, delivery_id))
