"""Requests as values: where each call of the client goes and what its answer is. The two clients only send them.

A call that makes something carries an Idempotency-Key of its own, so that it may be sent again when its answer was lost.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic
from urllib.parse import quote

import httpx

from api.client.errors import CannotSend
from api.client.transport import Answer
from grpo_engine.contract.presets import PresetCard
from grpo_engine.contract.rollout import RolloutPage
from grpo_engine.contract.study_view import Comparison, GuardrailReplay
from grpo_engine.contract.sweep_view import Sweep
from grpo_engine.contract.view import Checkpoint, Deleted, File, GraderRun, Integrity, Job, JobOutcome, Page, Validated
from grpo_engine.contract.view_base import View
from grpo_engine.contract.webhook_view import (
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEndpointDeleted,
    WebhookEndpointWithSecret,
    WebhookTestResult,
)

JOBS = "/v1/fine_tuning/jobs"
SWEEPS = "/v1/fine_tuning/sweeps"
ENDPOINTS = "/v1/webhook_endpoints"
GRADERS = "/v1/fine_tuning/alpha/graders"
PROBE_TIMEOUT_S = 900.0
"""A probe waits for a free worker and loads a model; far longer than any other answer takes."""


class CheckedGrader(View):
    """A well-formed grader with its defaults."""

    grader: dict[str, Any]


@dataclass(frozen=True)
class Call(Generic[Answer]):
    """One request."""

    kind: type[Answer]
    method: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of httpx: params, json, headers, timeout."""


def given(**params: Any) -> dict[str, Any]:
    """The parameters that were given."""
    return {name: value for name, value in params.items() if value is not None}


def at(*parts: str) -> str:
    """An address out of a prefix and ids that came from outside. Raises CannotSend for what can be no id."""
    for part in parts[1:]:
        if not part or not part.isprintable() or part in (".", ".."):
            raise CannotSend(f"{part!r} is no id; copy it from a list, for example `grpo list`")
    return "/".join([parts[0], *(quote(part, safe="") for part in parts[1:])])


def once(key: str | None) -> dict[str, str]:
    """The header that makes sending twice harmless."""
    return {"idempotency-key": key or str(uuid.uuid4())}


# Jobs


def create_by_key(key: str, spec: Mapping[str, Any]) -> Call[Job]:
    """The job of this key."""
    return Call(Job, "PUT", at(f"{JOBS}/by-key", key), {"json": dict(spec)})


def validate(spec: Mapping[str, Any], *, probe: bool = False) -> Call[Validated]:
    """Every check of a create."""
    waits = {"params": {"probe": "true"}, "timeout": httpx.Timeout(PROBE_TIMEOUT_S, connect=5.0)} if probe else {}
    return Call(Validated, "POST", f"{JOBS}/validate", {"json": dict(spec), **waits})


def outcome(job_id: str) -> Call[JobOutcome]:
    """How a job ended."""
    return Call(JobOutcome, "GET", at(JOBS, job_id, "outcome"))


def fork(
    job_id: str, checkpoint: str | None, overrides: Mapping[str, Any] | None, suffix: str | None, idempotency_key: str | None
) -> Call[Job]:
    """A new job from a checkpoint."""
    body = given(checkpoint=checkpoint, overrides=None if overrides is None else dict(overrides), suffix=suffix)
    return Call(Job, "POST", at(JOBS, job_id, "fork"), {"json": body, "headers": once(idempotency_key)})


def compare(job_ids: Sequence[str], names: Sequence[str] | None, align: str, limit: int | None) -> Call[Comparison]:
    """Jobs side by side."""
    params = given(jobs=list(job_ids), names=None if names is None else list(names), align=align, limit=limit)
    return Call(Comparison, "GET", "/v1/fine_tuning/compare", {"params": params})


def rollouts(job_id: str, step: int | None, after: int | None, limit: int | None) -> Call[RolloutPage]:
    """Completions of a step."""
    return Call(RolloutPage, "GET", at(JOBS, job_id, "rollouts"), {"params": given(step=step, after=after, limit=limit)})


def integrity(job_id: str) -> Call[Integrity]:
    """Whether the telemetry is whole."""
    return Call(Integrity, "GET", at(JOBS, job_id, "metrics", "integrity"))


def replay_guardrails(
    job_id: str, diagnostics: Mapping[str, Any] | None, guardrails: Sequence[Mapping[str, Any]] | None
) -> Call[GuardrailReplay]:
    """What rules would have done."""
    body = given(diagnostics=diagnostics, guardrails=None if guardrails is None else [dict(rule) for rule in guardrails])
    return Call(GuardrailReplay, "POST", at(JOBS, job_id, "guardrails", "replay"), {"json": body})


# Checkpoints


def mark(job_id: str, checkpoint_id: str, word: str, *, is_set: bool) -> Call[Checkpoint]:
    """Pin or withdraw."""
    return Call(Checkpoint, "POST" if is_set else "DELETE", at(JOBS, job_id, "checkpoints", checkpoint_id, word))


def promote(job_id: str, checkpoint_id: str, gates: Mapping[str, float], note: str | None) -> Call[Checkpoint]:
    """Promote behind gates."""
    body = {"gates": dict(gates), **given(note=note)}
    return Call(Checkpoint, "POST", at(JOBS, job_id, "checkpoints", checkpoint_id, "promote"), {"json": body})


def delete_checkpoint(job_id: str, checkpoint_id: str) -> Call[Deleted]:
    """Its files go."""
    return Call(Deleted, "DELETE", at(JOBS, job_id, "checkpoints", checkpoint_id))


# Files, presets


def file(file_id: str) -> Call[File]:
    """One uploaded file."""
    return Call(File, "GET", at("/v1/files", file_id))


def presets() -> Call[Page[PresetCard]]:
    """Named defaults."""
    return Call(Page[PresetCard], "GET", "/v1/presets")


# Sweeps


def create_sweep(request: Mapping[str, Any], idempotency_key: str | None) -> Call[Sweep]:
    """Several jobs from one base."""
    return Call(Sweep, "POST", SWEEPS, {"json": dict(request), "headers": once(idempotency_key)})


def sweeps(limit: int, after: str | None) -> Call[Page[Sweep]]:
    """A page of sweeps."""
    return Call(Page[Sweep], "GET", SWEEPS, {"params": given(limit=limit, after=after)})


def sweep(sweep_id: str) -> Call[Sweep]:
    """One sweep."""
    return Call(Sweep, "GET", at(SWEEPS, sweep_id))


def steer_sweep(sweep_id: str, word: str) -> Call[Sweep]:
    """Cancel, pause or resume its members."""
    return Call(Sweep, "POST", at(SWEEPS, sweep_id, word))


# Graders


def run_grader(grader: Mapping[str, Any], model_sample: str, item: Mapping[str, Any] | None) -> Call[GraderRun]:
    """Score one sample."""
    body = {"grader": dict(grader), "model_sample": model_sample, "item": dict(item or {})}
    return Call(GraderRun, "POST", f"{GRADERS}/run", {"json": body})


def check_grader(grader: Mapping[str, Any]) -> Call[CheckedGrader]:
    """Whether it is well formed."""
    return Call(CheckedGrader, "POST", f"{GRADERS}/validate", {"json": {"grader": dict(grader)}})


# Webhooks


def create_webhook(name: str, url: str, event_types: Sequence[str]) -> Call[WebhookEndpointWithSecret]:
    """A subscriber."""
    body = {"name": name, "url": url, "event_types": list(event_types)}
    return Call(WebhookEndpointWithSecret, "POST", ENDPOINTS, {"json": body})


def webhooks(limit: int, after: str | None) -> Call[Page[WebhookEndpoint]]:
    """A page of subscribers."""
    return Call(Page[WebhookEndpoint], "GET", ENDPOINTS, {"params": given(limit=limit, after=after)})


def webhook(endpoint_id: str) -> Call[WebhookEndpoint]:
    """One subscriber."""
    return Call(WebhookEndpoint, "GET", at(ENDPOINTS, endpoint_id))


def change_webhook(endpoint_id: str, name: str | None, url: str | None, event_types: Sequence[str] | None) -> Call[WebhookEndpoint]:
    """Another name, url or set of types."""
    body = given(name=name, url=url, event_types=None if event_types is None else list(event_types))
    return Call(WebhookEndpoint, "POST", at(ENDPOINTS, endpoint_id), {"json": body})


def delete_webhook(endpoint_id: str) -> Call[WebhookEndpointDeleted]:
    """Tell it nothing more."""
    return Call(WebhookEndpointDeleted, "DELETE", at(ENDPOINTS, endpoint_id))


def rotate_webhook_secret(endpoint_id: str, keep_old: bool) -> Call[WebhookEndpointWithSecret]:
    """A new secret."""
    body = {"keep_old_secret_active_for_24_hours": keep_old}
    return Call(WebhookEndpointWithSecret, "POST", at(ENDPOINTS, endpoint_id, "rotate_secret"), {"json": body})


def test_webhook(endpoint_id: str, event_type: str) -> Call[WebhookTestResult]:
    """A signed sample, now."""
    return Call(WebhookTestResult, "POST", at(ENDPOINTS, endpoint_id, "test"), {"json": {"event_type": event_type}})


def deliveries(endpoint_id: str, status: str | None, limit: int, after: str | None) -> Call[Page[WebhookDelivery]]:
    """The log."""
    params = given(status=status, limit=limit, after=after)
    return Call(Page[WebhookDelivery], "GET", at(ENDPOINTS, endpoint_id, "deliveries"), {"params": params})


def redeliver(endpoint_id: str, delivery_id: str) -> Call[WebhookDelivery]:
    """Once more."""
    return Call(WebhookDelivery, "POST", at(ENDPOINTS, endpoint_id, "deliveries", delivery_id, "redeliver"))
