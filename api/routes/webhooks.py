"""/v1/webhook_endpoints: who is told what happens to jobs, over Standard Webhooks. The dispatcher delivers."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from api.auth import requires
from api.deps import BodyDep, Services, ServicesDep
from api.openapi import json_request
from api.present import answer
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import validate
from grpo_engine.contract.view import Page
from grpo_engine.contract.webhook_view import (
    EndpointChange,
    NewEndpoint,
    RotateSecret,
    TestEndpoint,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEndpointDeleted,
    WebhookEndpointWithSecret,
    WebhookEventTypes,
    WebhookTestResult,
)
from grpo_engine.outbound.address import AddressRefused, check_url
from grpo_engine.outbound.signature import hint, new_secret
from jobs.ledger.deliveries import DeliveryRecord, NewDelivery
from jobs.ledger.webhooks import EndpointRecord
from jobs.webhooks.events import EVENT_TYPES, sample
from jobs.webhooks.sender import TIMEOUT_S, Sender

router = APIRouter(prefix="/v1", tags=["webhooks"])

EndpointId = Annotated[str, Path(max_length=80)]
DeliveryId = Annotated[str, Path(max_length=80)]


class SubscriberUnreachable(InvalidRequest):
    """There was no answer to a test."""

    code = "subscriber_unreachable"


@router.get("/webhook_event_types", response_model=WebhookEventTypes)
@requires("read")
def event_types() -> Response:
    """What can be subscribed to."""
    return answer(WebhookEventTypes(data=list(EVENT_TYPES)))


@router.post("/webhook_endpoints", response_model=WebhookEndpointWithSecret, openapi_extra=json_request(NewEndpoint))
@requires("admin")
def create(body: BodyDep, services: ServicesDep) -> Response:
    """A new subscriber; it hears what happens from now on. The answer holds the signing secret, this once."""
    wanted = validate(NewEndpoint, body)
    _check(services, wanted.url)
    record = services.ledger.add_endpoint(name=wanted.name, url=wanted.url, event_types=wanted.event_types, secret=new_secret())
    return answer(_with_secret(record))


@router.get("/webhook_endpoints", response_model=Page[WebhookEndpoint])
@requires("read")
def list_endpoints(
    services: ServicesDep,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """A page of subscribers, newest first."""
    page = services.ledger.list_endpoints(after=after, limit=limit, order=order)
    shown = [_view(record) for record in page.data]
    ids = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {}
    return answer(Page[WebhookEndpoint](data=shown, has_more=page.has_more, **ids))


@router.get("/webhook_endpoints/{endpoint_id}", response_model=WebhookEndpoint)
@requires("read")
def get(endpoint_id: EndpointId, services: ServicesDep) -> Response:
    """One subscriber."""
    return answer(_view(services.ledger.get_endpoint(endpoint_id)))


@router.post("/webhook_endpoints/{endpoint_id}", response_model=WebhookEndpoint, openapi_extra=json_request(EndpointChange))
@requires("admin")
def update(endpoint_id: EndpointId, body: BodyDep, services: ServicesDep) -> Response:
    """Change name, url or the set of event types; deliveries under way go to the new url."""
    wanted = validate(EndpointChange, body)
    if wanted.url is not None:
        _check(services, wanted.url)
    record = services.ledger.change_endpoint(endpoint_id, name=wanted.name, url=wanted.url, event_types=wanted.event_types)
    return answer(_view(record))


@router.delete("/webhook_endpoints/{endpoint_id}", response_model=WebhookEndpointDeleted)
@requires("admin")
def delete(endpoint_id: EndpointId, services: ServicesDep) -> Response:
    """Tell it nothing more; what is pending is dropped."""
    services.ledger.delete_endpoint(endpoint_id)
    return answer(WebhookEndpointDeleted(id=endpoint_id))


@router.post(
    "/webhook_endpoints/{endpoint_id}/rotate_secret", response_model=WebhookEndpointWithSecret, openapi_extra=json_request(RotateSecret)
)
@requires("admin")
def rotate_secret(endpoint_id: EndpointId, body: BodyDep, services: ServicesDep) -> Response:
    """A new signing secret, shown this once; if asked, the old one signs as well for 24 hours."""
    keep_old = validate(RotateSecret, body).keep_old_secret_active_for_24_hours
    return answer(_with_secret(services.ledger.rotate_endpoint_secret(endpoint_id, new_secret(), keep_old=keep_old)))


@router.post("/webhook_endpoints/{endpoint_id}/test", response_model=WebhookTestResult, openapi_extra=json_request(TestEndpoint))
@requires("admin")
def test(endpoint_id: EndpointId, body: BodyDep, services: ServicesDep) -> Response:
    """Send a signed sample now and say what came back; it is tried once and enters the log. 422 `subscriber_unreachable` when
    nothing came back within 10 s."""
    wanted = validate(TestEndpoint, body)
    ledger = services.ledger
    endpoint = ledger.get_endpoint(endpoint_id)
    identity, content = sample(wanted.event_type, ledger.clock())
    new = NewDelivery(endpoint.id, None, identity, wanted.event_type, content)
    delivery = ledger.add_delivery(new, claimed_until=ledger.clock() + 3 * TIMEOUT_S)
    sent = Sender(allow_private=services.settings.webhook_allow_private).send(
        endpoint.url, identity, content, endpoint.keys(ledger.clock())
    )
    ledger.record_try(
        delivery.id, status="delivered" if sent.is_delivered else "failed", status_code=sent.status_code, error=sent.error,
        next_try_at=ledger.clock(),
    )  # fmt: skip
    if sent.status_code is None:
        raise SubscriberUnreachable(f"{endpoint.url} cannot be reached: {sent.error}", param="url")
    return answer(WebhookTestResult(webhook_endpoint_id=endpoint.id, event_type=wanted.event_type, status_code=sent.status_code))


@router.get("/webhook_endpoints/{endpoint_id}/deliveries", response_model=Page[WebhookDelivery])
@requires("read")
def deliveries(
    endpoint_id: EndpointId,
    services: ServicesDep,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    status: Literal["pending", "delivered", "failed"] | None = None,
) -> Response:
    """What was sent to it, newest first; finished deliveries are kept for 30 days."""
    services.ledger.get_endpoint(endpoint_id)
    page = services.ledger.deliveries(endpoint_id, after=after, limit=limit, status=status)
    shown = [_delivery_view(record) for record in page.data]
    ids = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {}
    return answer(Page[WebhookDelivery](data=shown, has_more=page.has_more, **ids))


@router.post("/webhook_endpoints/{endpoint_id}/deliveries/{delivery_id}/redeliver", status_code=202, response_model=WebhookDelivery)
@requires("admin")
def redeliver(endpoint_id: EndpointId, delivery_id: DeliveryId, services: ServicesDep) -> Response:
    """Send it again, with the same event id and a fresh count of tries."""
    services.ledger.get_endpoint(endpoint_id)
    return answer(_delivery_view(services.ledger.redeliver(endpoint_id, delivery_id)), status=202)


def _check(services: Services, url: str) -> None:
    try:
        check_url(url, allow_private=services.settings.webhook_allow_private)
    except AddressRefused as error:
        raise InvalidRequest(f"url: {error}", param="url") from error


def _view(record: EndpointRecord) -> WebhookEndpoint:
    return WebhookEndpoint(
        id=record.id,
        created_at=int(record.created_at),
        updated_at=int(record.updated_at),
        name=record.name,
        url=record.url,
        event_types=list(record.event_types),
        signing_secret_hint=hint(record.secret),
    )


def _with_secret(record: EndpointRecord) -> WebhookEndpointWithSecret:
    return WebhookEndpointWithSecret(**_view(record).model_dump(), signing_secret=record.secret)


def _delivery_view(record: DeliveryRecord) -> WebhookDelivery:
    return WebhookDelivery(
        id=record.id,
        webhook_endpoint_id=record.endpoint_id,
        event_id=record.event_id,
        event_type=record.event_type,
        created_at=int(record.created_at),
        status=record.status,
        tries=record.tries,
        next_try_at=int(record.next_try_at) if record.status == "pending" else None,
        last_try_at=None if record.last_try_at is None else int(record.last_try_at),
        status_code=record.status_code,
        error=record.error,
        payload=json.loads(record.body),
    )
