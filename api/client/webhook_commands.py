"""`grpo webhooks`: who is told what happens to jobs, and whether they heard."""

from __future__ import annotations

import time
from typing import Annotated, Literal, get_args

import typer

from api.client.sync import DEFAULT_URL, Grpo
from api.client.terminal import Json, Key, Url, say, show, table
from grpo_engine.contract.webhook_view import EventType, WebhookEndpointWithSecret

app = typer.Typer(name="webhooks", help="Subscribers: who is told what happens to jobs.", no_args_is_help=True)

EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
ENDINGS: tuple[EventType, ...] = ("fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled")
EndpointId = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Endpoint id, whe-...")]


DeliveryStatus = Literal["pending", "delivered", "failed"]


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Its name.")],
    target: Annotated[str, typer.Argument(metavar="URL", help="Where to POST; https and public unless the server allows others.")],
    events: Annotated[list[str] | None, typer.Option("--event", help="Event type; repeat for more. [default: how jobs end]")] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Tell a URL what happens to jobs from now on. Prints the signing secret, this once."""
    with Grpo(url, api_key) as client:
        _show_secret(client.create_webhook(name, target, _types(events) or ENDINGS), as_json)


@app.command("list")
def list_endpoints(as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """List subscribers, newest first."""
    with Grpo(url, api_key) as client:
        found = client.webhooks(limit=100).data
    rows = [(one.id, one.name, one.url, ", ".join(_short(kind) for kind in one.event_types)) for one in found]
    table(("endpoint", "name", "url", "events"), rows, found, as_json)


@app.command("types")
def types() -> None:
    """List what can be subscribed to."""
    for kind in EVENT_TYPES:
        typer.echo(kind)


@app.command("change")
def change(
    endpoint_id: EndpointId,
    name: Annotated[str | None, typer.Option(help="Another name.")] = None,
    target: Annotated[str | None, typer.Option("--to", help="Another URL.")] = None,
    events: Annotated[list[str] | None, typer.Option("--event", help="The whole new set of event types; repeat for more.")] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Change name, URL or event types."""
    with Grpo(url, api_key) as client:
        show(client.change_webhook(endpoint_id, name=name, url=target, event_types=_types(events)), as_json, f"{endpoint_id} is changed")


@app.command("delete")
def delete(endpoint_id: EndpointId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Tell it nothing more."""
    with Grpo(url, api_key) as client:
        show(client.delete_webhook(endpoint_id), as_json, f"{endpoint_id} is told nothing more")


@app.command("test")
def send_sample(
    endpoint_id: EndpointId,
    event: Annotated[str, typer.Option(help="Event type of the sample.")] = "fine_tuning.job.succeeded",
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Send a signed sample now. Exit code 1 when the subscriber does not take it."""
    with Grpo(url, api_key) as client:
        found = client.test_webhook(endpoint_id, _type(event))
    show(found, as_json, f"the subscriber answered {found.status_code}")
    raise typer.Exit(0 if 200 <= found.status_code < 300 else 1)


@app.command("deliveries")
def deliveries(
    endpoint_id: EndpointId,
    status: Annotated[DeliveryStatus | None, typer.Option(help="Only these.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """What was sent to it, newest first."""
    with Grpo(url, api_key) as client:
        found = client.deliveries(endpoint_id, status=status, limit=limit).data
    rows = [
        (one.id, time.strftime("%d %b %H:%M:%S", time.localtime(one.created_at)), _short(one.event_type), one.status, str(one.tries),
         one.error or "")
        for one in found
    ]  # fmt: skip
    table(("delivery", "made", "event", "status", "tries", "last error"), rows, found, as_json)


@app.command("redeliver")
def redeliver(
    endpoint_id: EndpointId,
    delivery_id: Annotated[str, typer.Argument(metavar="DELIVERY", help="Delivery id, whd-...")],
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Send a delivery again, with the same event id."""
    with Grpo(url, api_key) as client:
        found = client.redeliver(endpoint_id, delivery_id)
    show(found, as_json, f"{found.id} is {found.status} again; grpo webhooks deliveries {endpoint_id} tells how it went")


@app.command("rotate")
def rotate(
    endpoint_id: EndpointId,
    keep_old: Annotated[bool, typer.Option("--keep-old", help="The old secret signs as well for 24 hours.")] = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Make a new signing secret and print it, this once."""
    with Grpo(url, api_key) as client:
        _show_secret(client.rotate_webhook_secret(endpoint_id, keep_old=keep_old), as_json)


def _show_secret(made: WebhookEndpointWithSecret, as_json: bool) -> None:
    show(made, as_json, f"endpoint {made.id} is signed with the secret below; keep it, it is not shown again")
    if not as_json:
        say(made.signing_secret)


def _types(given: list[str] | None) -> list[EventType] | None:
    return None if given is None else [_type(one) for one in given]


def _type(given: str) -> EventType:
    """A type by its full name or without `fine_tuning.job.`."""
    for kind in EVENT_TYPES:
        if given in (kind, _short(kind)):
            return kind
    raise typer.BadParameter(f"{given!r} is no event type; grpo webhooks types lists them", param_hint="--event")


def _short(kind: str) -> str:
    return kind.removeprefix("fine_tuning.job.")
