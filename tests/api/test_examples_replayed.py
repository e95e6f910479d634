"""The OpenAPI document has an example for each call, and the server takes every one of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx

from api.examples import CHECKPOINT, DELIVERY, ENDPOINT, FILE, JOB, MODEL, SWEEP
from api.sse import StreamLimits
from jobs.settings import Settings
from tests.api.conftest import Hand, Server, create, step_event, upload
from tests.api.test_fork import save

LATE = ("delete", "cancel", "pause", "resume", "promote", "pin")
"""Calls that change what others read come last, in this order from the end."""
STATES = {409: ("resume", "outcome"), 404: ("outcome", "rollouts", "redeliver"), 422: ("test",)}
"""Answers that the state of this stage gives to a right call: nothing is paused, ended or delivered, and nobody listens."""


def calls(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and operation; those that end something last."""
    found = [(method, path, operation) for path, methods in document["paths"].items() for method, operation in methods.items()]

    def rank(call: tuple[str, str, dict[str, Any]]) -> int:
        last = call[1].rpartition("/")[2]
        if call[0] == "delete":
            return {"promote": 2, "pin": 3}.get(last, 4)  # a promotion pins, and a pinned checkpoint stays
        return 2 if last == "cancel" else 1 if last in LATE else 0

    return sorted(found, key=rank)


def test_every_example_is_taken(api_settings: Settings, limits: StreamLimits) -> None:
    server = Server(replace(api_settings, webhook_allow_private=True), limits)
    parts = server.app.state.services
    try:
        with server.client() as client:
            file_id, job_id = upload(client), create(client)
            hand = Hand(parts.ledger, parts.live)
            epoch = hand.start(job_id)
            save(hand, server, job_id, epoch, 1, 5)
            hand.ingest(job_id, step_event(epoch, 2, 6))
            (server.settings.data_dir / "jobs" / job_id / "attempts" / str(epoch)).mkdir(parents=True, exist_ok=True)
            parts.artifacts.log_path(job_id, epoch).write_text("step 1\n")
            real = {
                JOB: job_id,
                FILE: file_id,
                CHECKPOINT: client.get(f"/v1/fine_tuning/jobs/{job_id}/checkpoints").json()["data"][0]["id"],
                MODEL: "tiny",
                ENDPOINT: "whe-none",
                DELIVERY: "whd-none",
                SWEEP: "ftsweep-none",
            }
            document = client.get("/openapi.json").json()
            refused = [words for call in calls(document) if (words := _replay(client, *call, real)) is not None]
            assert "\n".join(refused) == ""
    finally:
        server.stop()


def _replay(client: httpx.Client, method: str, path: str, operation: dict[str, Any], real: dict[str, str]) -> str | None:
    """What the server says against the example; None when it takes it."""
    if (method, path) == ("post", "/v1/files"):
        return None  # test_files.py; a form has no example
    query: dict[str, Any] = {}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "header":
            continue
        if parameter["required"]:
            assert "example" in parameter, (method, path, parameter["name"])
        if "example" in parameter:
            value = json.loads(_with(json.dumps(parameter["example"]), real))
            if parameter["in"] == "path":
                path = path.replace("{" + parameter["name"] + "}", value)
            else:
                query[parameter["name"]] = value
    body = None
    for content in operation.get("requestBody", {}).get("content", {}).values():
        assert "example" in content, (method, path)
        body = json.loads(_with(json.dumps(content["example"]), real))
    with client.stream(method, path, params=query, json=body) as answer:
        if not path.endswith("/stream") or answer.is_error:
            answer.read()
    last = path.rpartition("/")[2]
    allowed = [status for status, names in STATES.items() if last in names]
    if answer.status_code not in (200, 201, 202, 204, *allowed) and path != "/readyz":
        return f"{method} {path}: {answer.text[:300]}"
    if path == "/v1/webhook_endpoints" and method == "post":
        real[ENDPOINT] = answer.json()["id"]
    if path == "/v1/fine_tuning/sweeps" and method == "post":
        real[SWEEP] = answer.json()["id"]
    return None


def _with(text: str, real: dict[str, str]) -> str:
    for example, value in real.items():
        text = text.replace(example, value)
    return text
