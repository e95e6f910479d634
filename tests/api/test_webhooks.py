"""Webhooks over real HTTP: a subscriber on loopback, the courier of the dispatcher, signatures checked by other people's libraries."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx
import openai
import pytest
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from api.sse import StreamLimits
from grpo_engine.outbound.address import AddressRefused, check_url, resolve
from grpo_engine.outbound.signature import new_secret
from jobs.dispatcher import Dispatcher
from jobs.dispatcher.courier import Courier
from jobs.ledger import Ledger
from jobs.settings import Settings
from jobs.webhooks.sender import ANSWER_BYTES, Sender
from tests.api.conftest import Hand, Server, create, event, eventually
from tests.jobs.makers import make_job
from tests.listener import Heard, Reply, listen

ENDPOINTS = "/v1/webhook_endpoints"
SUCCEEDED = "fine_tuning.job.succeeded"
CREATED = "fine_tuning.job.created"


@dataclass
class Subscriber:
    """An HTTP server that keeps what it gets and answers as it is told."""

    url: str
    statuses: list[int] = field(default_factory=list)
    """Answers still to be given; 200 when empty."""
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    hold: threading.Event | None = None

    def hear(self, heard: Heard) -> Reply:
        self.got.append((heard.headers, heard.body))
        if self.hold is not None:
            self.hold.wait(20)
        return Reply(self.body, self.statuses.pop(0) if self.statuses else 200, self.headers)


@contextmanager
def subscriber() -> Iterator[Subscriber]:
    state = Subscriber("")
    with listen(state.hear) as address:
        state.url = f"{address}/hook"
        yield state
        if state.hold is not None:
            state.hold.set()


@pytest.fixture
def hook() -> Iterator[Subscriber]:
    with subscriber() as state:
        yield state


@pytest.fixture
def api_settings(api_settings: Settings) -> Settings:
    return replace(api_settings, webhook_allow_private=True, webhook_retry_s=0.01)


@pytest.fixture
def courier(api_settings: Settings, hand: Hand) -> Iterator[Courier]:
    running = Courier(hand.ledger, api_settings)
    yield running
    running.close()


def subscribe(client: httpx.Client, hook: Subscriber, *kinds: str) -> dict[str, Any]:
    answer = client.post(ENDPOINTS, json={"name": "ci", "url": hook.url, "event_types": list(kinds)})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def log_of(client: httpx.Client, endpoint: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(f"{ENDPOINTS}/{endpoint['id']}/deliveries").json()["data"]
    return found


def settled(client: httpx.Client, courier: Courier, endpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Turn until nothing is pending."""

    def is_over() -> bool:
        courier.turn()
        found = log_of(client, endpoint)
        return bool(found) and all(one["status"] != "pending" for one in found)

    eventually(is_over)
    return log_of(client, endpoint)


def test_both_libraries_verify_what_arrives(client: httpx.Client, hand: Hand, courier: Courier, hook: Subscriber) -> None:
    endpoint = subscribe(client, hook, SUCCEEDED)
    job_id = create(client)
    hand.start(job_id)
    hand.finish(job_id)
    (delivery,) = settled(client, courier, endpoint)
    ((headers, body),) = hook.got
    secret = endpoint["signing_secret"]
    assert secret.startswith("whsec_")
    assert Webhook(secret).verify(body, headers)["data"]["id"] == job_id
    with openai.OpenAI(api_key="unused", webhook_secret=secret) as sdk:
        told = cast(Any, sdk.webhooks.unwrap(body, headers))
        assert (told.type, told.data.id, told.object, told.id) == (SUCCEEDED, job_id, "event", headers["webhook-id"])
        with pytest.raises(openai.InvalidWebhookSignatureError):
            sdk.webhooks.unwrap(body + b" ", headers)
    assert (delivery["status"], delivery["tries"], delivery["status_code"], delivery["event_id"]) == (
        "delivered", 1, 200, headers["webhook-id"],
    )  # fmt: skip
    assert delivery["payload"] == json.loads(body)


def test_the_dispatcher_delivers_and_waits_for_what_is_under_way_when_it_ends(
    client: httpx.Client, api_settings: Settings, hook: Subscriber
) -> None:
    endpoint = subscribe(client, hook, CREATED)
    create(client)
    dispatcher = Dispatcher.open(api_settings)
    dispatcher.turn()
    dispatcher.close()
    assert log_of(client, endpoint)[0]["status"] == "delivered"


def test_failed_tries_are_repeated_with_one_id_and_then_given_up(
    client: httpx.Client, courier: Courier, hook: Subscriber, api_settings: Settings
) -> None:
    endpoint = subscribe(client, hook, CREATED)
    hook.statuses = [500, 503]
    create(client)
    (delivery,) = settled(client, courier, endpoint)
    assert (delivery["status"], delivery["tries"]) == ("delivered", 3)
    assert len({headers["webhook-id"] for headers, _ in hook.got}) == 1


def test_410_ends_it_at_once_and_a_redirect_is_not_followed(client: httpx.Client, courier: Courier, hook: Subscriber) -> None:
    endpoint = subscribe(client, hook, CREATED)
    hook.statuses = [302, 410]
    hook.headers = {"location": hook.url}
    create(client)
    (delivery,) = settled(client, courier, endpoint)
    assert (delivery["status"], delivery["tries"], delivery["status_code"]) == ("failed", 2, 410)
    assert len(hook.got) == 2
    again = client.post(f"{ENDPOINTS}/{endpoint['id']}/deliveries/{delivery['id']}/redeliver")
    assert (again.status_code, again.json()["status"]) == (202, "pending")
    (delivery,) = settled(client, courier, endpoint)
    assert (delivery["status"], delivery["tries"]) == ("delivered", 1)
    assert len({headers["webhook-id"] for headers, _ in hook.got}) == 1


def test_a_subscriber_that_hangs_stops_neither_the_turn_nor_others(client: httpx.Client, courier: Courier, hook: Subscriber) -> None:
    with subscriber() as slow:
        slow.hold = threading.Event()
        hanging, other = subscribe(client, slow, CREATED), subscribe(client, hook, CREATED)
        create(client)
        courier.turn()
        assert settled(client, courier, other)[0]["status"] == "delivered"
        assert log_of(client, hanging)[0]["status"] == "pending"
        slow.hold.set()
        assert settled(client, courier, hanging)[0]["status"] == "delivered"


def test_each_event_is_planned_once_for_those_who_asked_and_were_there(
    client: httpx.Client, hand: Hand, courier: Courier, hook: Subscriber, api_settings: Settings
) -> None:
    create(client)
    endpoint = subscribe(client, hook, CREATED, "fine_tuning.job.checkpoint_saved")
    job_id = create(client)
    epoch = hand.start(job_id)
    for seq, kind, name in ((1, "resume", "resume-000005"), (2, "published", "step-000005")):
        data = {"name": name, "step": 5, "kind": kind, "files": [{"name": "config.json", "bytes": 2, "sha256": "0" * 64}], "bytes": 2}
        saved = event(epoch, seq, "checkpoint.saved", 5, **data)
        hand.ingest(job_id, saved.model_copy(update={"time": hand.ledger.clock()}))
    second = Courier(hand.ledger, api_settings)
    for _ in range(3):
        courier.turn()
        second.turn()
    second.close()
    settled(client, courier, endpoint)
    told = sorted((json.loads(body)["type"], json.loads(body)["data"]["id"]) for _, body in hook.got)
    assert told == [("fine_tuning.job.checkpoint_saved", job_id), (CREATED, job_id)]


def test_the_plan_holds_on_both_databases(any_ledger: Ledger, settings: Settings, hook: Subscriber) -> None:
    endpoint = any_ledger.add_endpoint(name="n", url=hook.url, event_types=[CREATED], secret=new_secret())
    make_job(any_ledger)
    courier = Courier(any_ledger, replace(settings, webhook_allow_private=True))

    def is_delivered() -> bool:
        courier.turn()
        return [one.status for one in any_ledger.deliveries(endpoint.id).data] == ["delivered"]

    eventually(is_delivered)
    courier.close()
    assert any_ledger.forget_deliveries(any_ledger.clock() + 1) == 1
    any_ledger.delete_endpoint(endpoint.id)
    assert any_ledger.endpoints() == []


def test_the_sdk_manages_endpoints(server: Server, hook: Subscriber) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as sdk:
        made = sdk.webhooks.create(name="ci", url=hook.url, event_types=[SUCCEEDED])
        assert SUCCEEDED in sdk.webhooks.event_types.list().data
        shown = sdk.webhooks.retrieve(made.id)
        assert "signing_secret" not in shown.model_dump()
        assert shown.signing_secret_hint == f"whsec_...{made.signing_secret[-4:]}"
        assert [one.id for one in sdk.webhooks.list()] == [made.id]
        assert sdk.webhooks.update(made.id, name="other").name == "other"
        rotated = sdk.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
        assert sdk.webhooks.test(made.id, event_type=SUCCEEDED).status_code == 200
        headers, body = hook.got[0]
        for secret in (made.signing_secret, rotated.signing_secret):
            assert Webhook(secret).verify(body, headers)["data"]["id"] == "ftjob-test"
        final = sdk.webhooks.rotate_secret(made.id)
        assert sdk.webhooks.test(made.id, event_type=SUCCEEDED).status_code == 200
        headers, body = hook.got[1]
        Webhook(final.signing_secret).verify(body, headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(rotated.signing_secret).verify(body, headers)
        assert sdk.webhooks.delete(made.id).deleted is True
        with pytest.raises(openai.NotFoundError):
            sdk.webhooks.retrieve(made.id)


def test_a_test_that_reaches_nobody_says_so_and_enters_the_log(client: httpx.Client) -> None:
    endpoint = client.post(ENDPOINTS, json={"name": "n", "url": "http://127.0.0.1:9/x", "event_types": [SUCCEEDED]}).json()
    answer = client.post(f"{ENDPOINTS}/{endpoint['id']}/test", json={"event_type": SUCCEEDED})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "subscriber_unreachable")
    assert log_of(client, endpoint)[0]["status"] == "failed"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "n", "url": "https://example.com"}, "event_types"),
        ({"name": "n", "url": "https://example.com", "event_types": []}, "event_types"),
        ({"name": "n", "url": "https://example.com", "event_types": ["job.exploded"]}, "event_types[0]"),
        ({"name": "n", "url": "ftp://example.com", "event_types": [SUCCEEDED]}, "url"),
        ({"name": "n", "url": "http://u:p@example.com", "event_types": [SUCCEEDED]}, "url"),
    ],
)
def test_a_bad_endpoint_names_its_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post(ENDPOINTS, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)


REFUSED = [
    "http://example.com/", "https://localhost/", "https://127.0.0.1/", "https://10.1.2.3/", "https://169.254.169.254/latest",
    "https://192.168.0.1:8443/", "https://100.64.0.1/", "https://0.0.0.0/", "https://[::1]/", "https://[fe80::1]/", "https://[fd00::1]/",
    "https://[::ffff:127.0.0.1]/", "https://[64:ff9b::7f00:1]/", "https://[2002:7f00:1::]/", "https://224.0.0.1/", "https://[ff02::1]/",
    "https://user@example.com/", "https://example.com/#x", "https:///x", "https://example.com:0/", "https://example.com:99999/", "x" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_addresses_inside_are_refused(url: str) -> None:
    with pytest.raises(AddressRefused):
        check_url(url, allow_private=False)


def test_public_addresses_pass() -> None:
    for url in ("https://example.com/hook?x=1", "https://93.184.216.34/", "https://[2606:2800:220:1:248:1893:25c8:1946]:8443/"):
        check_url(url, allow_private=False)


def test_a_name_that_leads_inside_is_refused_when_it_is_resolved(hook: Subscriber) -> None:
    with pytest.raises(AddressRefused, match=r"127\.0\.0\.1|::1"):
        resolve("localhost", 443, allow_private=False)
    numeric = "https://2130706433/"  # 127.0.0.1 as one number, which resolvers accept
    sent = Sender(allow_private=False).send(numeric, "evt_1", "{}", [new_secret()])
    assert sent.status_code is None
    assert sent.error is not None
    assert hook.got == []


def test_an_endless_answer_and_a_silent_one_are_cut_off(hook: Subscriber) -> None:
    hook.body = b"x" * (ANSWER_BYTES * 50)
    assert Sender(allow_private=True).send(hook.url, "evt_1", "{}", [new_secret()]).is_delivered
    hook.hold = threading.Event()
    sent = Sender(allow_private=True, timeout_s=0.2).send(hook.url, "evt_1", "{}", [new_secret()])
    assert (sent.status_code, sent.error) == (None, "no answer within 0.2 s")


def test_a_server_that_allows_no_private_address_refuses_one(api_settings: Settings, limits: StreamLimits) -> None:
    strict = Server(replace(api_settings, webhook_allow_private=False), limits)
    try:
        with strict.client() as client:
            answer = client.post(ENDPOINTS, json={"name": "n", "url": "https://10.0.0.1/", "event_types": [SUCCEEDED]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (422, "url")
            assert "GRPO_WEBHOOK_ALLOW_PRIVATE" in answer.json()["detail"]
    finally:
        strict.stop()
