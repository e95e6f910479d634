"""The newer half of the client's calls, one line each; `Grpo` inherits them."""

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


class Studies(ABC):
    """Validation, forks, studies, promotion, sweeps, graders and webhooks."""

    @abstractmethod
    def send(self, call: Call[Answer]) -> Answer:
        """Send one request and read its answer. Raises ApiError, ServerUnreachable, UnknownAnswer, CannotSend."""

    # Jobs

    def create_job_by_key(self, key: str, spec: Mapping[str, Any]) -> Job:
        """The job of this key: made now, or the first one with the same key and spec. Raises ApiError `idempotency_key_reused`."""
        return self.send(calls.create_by_key(key, spec))

    def validate(self, spec: Mapping[str, Any], *, probe: bool = False) -> Validated:
        """Every check of a create and the resolved job; creates nothing. `probe` runs its first step on a worker, for its numbers alone."""
        return self.send(calls.validate(spec, probe=probe))

    def outcome(self, job_id: str) -> JobOutcome:
        """How the job ended. Raises ApiError `job_not_finished` until it has."""
        return self.send(calls.outcome(job_id))

    def fork(
        self,
        job_id: str,
        *,
        checkpoint: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        suffix: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """A new job from a published checkpoint (the newest) with the job's settings but for `overrides`."""
        return self.send(calls.fork(job_id, checkpoint, overrides, suffix, idempotency_key))

    def compare(
        self, job_ids: Sequence[str], names: Sequence[str] | None = None, *, align: Literal["step", "kl"] = "step", limit: int | None = None
    ) -> Comparison:
        """Curves of up to 20 jobs by step or by KL, and the reward-KL frontier over their checkpoints."""
        return self.send(calls.compare(job_ids, names, align, limit))

    def rollouts(self, job_id: str, *, step: int | None = None, after: int | None = None, limit: int | None = None) -> RolloutPage:
        """Completions of a step (the latest kept) with their rewards and KL, in order of `index`; `after` is an index."""
        return self.send(calls.rollouts(job_id, step, after, limit))

    def integrity(self, job_id: str) -> Integrity:
        """Missing and re-measured steps, gaps, and how far the database is behind."""
        return self.send(calls.integrity(job_id))

    def replay_guardrails(
        self, job_id: str, *, diagnostics: Mapping[str, Any] | None = None, guardrails: Sequence[Mapping[str, Any]] | None = None
    ) -> GuardrailReplay:
        """A dry run of detectors and guardrails over what the job has measured; what is left out is the job's own."""
        return self.send(calls.replay_guardrails(job_id, diagnostics, guardrails))

    # Checkpoints

    def pin(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        """Keep the checkpoint whatever `checkpoints.keep` says."""
        return self.send(calls.mark(job_id, checkpoint_id, "pin", is_set=True))

    def unpin(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        """Leave it to retention again."""
        return self.send(calls.mark(job_id, checkpoint_id, "pin", is_set=False))

    def promote(self, job_id: str, checkpoint_id: str, gates: Mapping[str, float], *, note: str | None = None) -> Checkpoint:
        """Promote it if it passes every gate: max_ref_kl, min_reward, max_beta, min_step. Raises ApiError `gate_failed`."""
        return self.send(calls.promote(job_id, checkpoint_id, gates, note))

    def withdraw_promotion(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        """Withdraw the promotion; the checkpoint stays pinned."""
        return self.send(calls.mark(job_id, checkpoint_id, "promote", is_set=False))

    def delete_checkpoint(self, job_id: str, checkpoint_id: str) -> Deleted:
        """Remove a published checkpoint for good. Raises ApiError `conflict` while it is pinned."""
        return self.send(calls.delete_checkpoint(job_id, checkpoint_id))

    # Files, presets

    def file(self, file_id: str) -> File:
        """One uploaded file."""
        return self.send(calls.file(file_id))

    def presets(self) -> list[PresetCard]:
        """Named defaults of `method.grpo`, with their sources."""
        return self.send(calls.presets()).data

    # Sweeps

    def create_sweep(self, request: Mapping[str, Any], *, idempotency_key: str | None = None) -> Sweep:
        """2 to 20 jobs from one base: `{"spec": {...}, "variants": [{"beta": 0.02}, ...]}`; all of them or none."""
        return self.send(calls.create_sweep(request, idempotency_key))

    def sweeps(self, *, limit: int = 20, after: str | None = None) -> Page[Sweep]:
        """A page of sweeps, newest first."""
        return self.send(calls.sweeps(limit, after))

    def sweep(self, sweep_id: str) -> Sweep:
        """Where each member is, and the frontier over all their checkpoints."""
        return self.send(calls.sweep(sweep_id))

    def cancel_sweep(self, sweep_id: str) -> Sweep:
        """Cancel every member that has not ended."""
        return self.send(calls.steer_sweep(sweep_id, "cancel"))

    def pause_sweep(self, sweep_id: str) -> Sweep:
        """Pause every member that can be paused."""
        return self.send(calls.steer_sweep(sweep_id, "pause"))

    def resume_sweep(self, sweep_id: str) -> Sweep:
        """Queue every paused member again."""
        return self.send(calls.steer_sweep(sweep_id, "resume"))

    # Graders

    def run_grader(self, grader: Mapping[str, Any], model_sample: str, item: Mapping[str, Any] | None = None) -> GraderRun:
        """Score one sample."""
        return self.send(calls.run_grader(grader, model_sample, item))

    def check_grader(self, grader: Mapping[str, Any]) -> CheckedGrader:
        """Check a grader and fill in its defaults."""
        return self.send(calls.check_grader(grader))

    # Webhooks

    def create_webhook(self, name: str, url: str, event_types: Sequence[EventType]) -> WebhookEndpointWithSecret:
        """A new subscriber; the answer holds its signing secret, this once."""
        return self.send(calls.create_webhook(name, url, event_types))

    def webhooks(self, *, limit: int = 20, after: str | None = None) -> Page[WebhookEndpoint]:
        """A page of subscribers, newest first."""
        return self.send(calls.webhooks(limit, after))

    def webhook(self, endpoint_id: str) -> WebhookEndpoint:
        """One subscriber."""
        return self.send(calls.webhook(endpoint_id))

    def change_webhook(
        self, endpoint_id: str, *, name: str | None = None, url: str | None = None, event_types: Sequence[EventType] | None = None
    ) -> WebhookEndpoint:
        """Change name, url or the whole set of event types."""
        return self.send(calls.change_webhook(endpoint_id, name, url, event_types))

    def delete_webhook(self, endpoint_id: str) -> WebhookEndpointDeleted:
        """Tell it nothing more."""
        return self.send(calls.delete_webhook(endpoint_id))

    def rotate_webhook_secret(self, endpoint_id: str, *, keep_old: bool = False) -> WebhookEndpointWithSecret:
        """A new secret, shown this once; `keep_old` lets the old one sign as well for 24 hours."""
        return self.send(calls.rotate_webhook_secret(endpoint_id, keep_old))

    def test_webhook(self, endpoint_id: str, event_type: EventType) -> WebhookTestResult:
        """Send a signed sample now. Raises ApiError `subscriber_unreachable`."""
        return self.send(calls.test_webhook(endpoint_id, event_type))

    def deliveries(
        self,
        endpoint_id: str,
        *,
        status: Literal["pending", "delivered", "failed"] | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> Page[WebhookDelivery]:
        """What was sent to it, newest first."""
        return self.send(calls.deliveries(endpoint_id, status, limit, after))

    def redeliver(self, endpoint_id: str, delivery_id: str) -> WebhookDelivery:
        """Send a delivery again, with the same event id."""
        return self.send(calls.redeliver(endpoint_id, delivery_id))
