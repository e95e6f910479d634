"""Webhook endpoints and deliveries: what a client posts and what the server shows, in the shapes of OpenAI's SDK."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_engine.contract.base import Strict, broken_rule
from grpo_engine.contract.view_base import View

EventType = Literal[
    "fine_tuning.job.created",
    "fine_tuning.job.running",
    "fine_tuning.job.paused",
    "fine_tuning.job.succeeded",
    "fine_tuning.job.failed",
    "fine_tuning.job.cancelled",
    "fine_tuning.job.detector_fired",
    "fine_tuning.job.detector_cleared",
    "fine_tuning.job.guardrail_acted",
    "fine_tuning.job.checkpoint_saved",
    "fine_tuning.job.checkpoint_promoted",
]
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=50)]
EndpointName = Annotated[str, Field(min_length=1, max_length=128)]
EndpointUrl = Annotated[str, Field(min_length=1, max_length=2048)]


class NewEndpoint(Strict):
    """A subscriber as posted."""

    name: EndpointName
    url: EndpointUrl
    """https, and a public address unless the operator allows others."""
    event_types: EventTypes


class EndpointChange(Strict):
    """What to change of a subscriber."""

    name: EndpointName | None = None
    url: EndpointUrl | None = None
    event_types: EventTypes | None = None
    """The complete new set."""

    @model_validator(mode="after")
    def _changes_something(self) -> EndpointChange:
        if self.name is None and self.url is None and self.event_types is None:
            raise broken_rule("name", "give at least one of name, url and event_types")
        return self


class RotateSecret(Strict):
    """A new secret, please."""

    keep_old_secret_active_for_24_hours: bool = False
    """Sign by the old one as well for a day."""


class TestEndpoint(Strict):
    """Send a sample."""

    __test__ = False

    event_type: EventType


class WebhookEndpoint(View):
    """A subscriber."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str


class WebhookEndpointWithSecret(WebhookEndpoint):
    """A subscriber and its secret, which is shown this once."""

    signing_secret: str
    """`whsec_...`; verify deliveries with it."""


class WebhookEndpointDeleted(View):
    """It hears nothing more."""

    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


class WebhookTestResult(View):
    """The subscriber answered the sample."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    success: Literal[True] = True
    """There was an answer; `status_code` says which."""
    status_code: int


class WebhookEventTypes(View):
    """What can be subscribed to."""

    object: Literal["list"] = "list"
    data: list[str]


class WebhookDelivery(View):
    """One event on its way to one subscriber."""

    id: str
    object: Literal["webhook_endpoint.delivery"] = "webhook_endpoint.delivery"
    webhook_endpoint_id: str
    event_id: str
    """The `webhook-id` header; the same on each try."""
    event_type: str
    created_at: int
    status: Literal["pending", "delivered", "failed"]
    tries: int
    next_try_at: int | None
    """null when nothing is pending."""
    last_try_at: int | None
    status_code: int | None
    """Of the last try; null when there was no answer."""
    error: str | None
    payload: dict[str, Any]
