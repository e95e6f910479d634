"""A job over HTTP: created, read, listed, stopped; and everything that must not become one."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api import retries
from api.admission import admit
from api.sse import StreamLimits
from jobs.settings import Settings
from tests.api.conftest import ROWS, Hand, Server, create, eventually, jsonl, spec, step_event, upload

JOBS = "/v1/fine_tuning/jobs"


def test_a_job_is_created_with_every_setting_resolved(client: httpx.Client) -> None:
    file_id = upload(client)
    answer = client.post(JOBS, json={**spec(file_id), "suffix": "sums", "metadata": {"team": "a"}, "seed": 7})
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"{JOBS}/{job['id']}"
    assert job["object"] == "fine_tuning.job"
    assert job["status"] == job["phase"] == "queued"
    assert job["is_terminal"] is False
    assert job["finished_at"] is None
    assert job["error"] is None
    assert job["training_file"] == file_id
    assert job["metadata"] == {"team": "a"}
    assert job["user_provided_suffix"] == "sums"
    assert job["resolved"]["beta"] == {"rule": "fixed", "value": 0.04}
    assert job["resolved"]["kl"]["estimator"] == "k3"
    assert job["resolved"]["sampling"]["group_size"] == 8
    assert (job["queue"]["position"], job["queue"]["ahead"], job["queue"]["eta"]) == (1, 0, None)
    assert "no live worker serves grpo-cpu" in job["queue"]["note"]
    assert all(isinstance(job[name], int) for name in ("created_at", "seed", "attempt"))
    assert client.get(f"{JOBS}/{job['id']}").json() == job


def _grpo(**changes: Any) -> dict[str, Any]:
    return spec("file-x", **changes)


_SYNC = "method.grpo.reference.sync_every"

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("an unknown key", _grpo(kl={"bta": 0.2}), "method.grpo.kl.bta"),
    ("a misspelt learning rate", _grpo(optimizer={"learning_rat": 1e-5}), "method.grpo.optimizer.learning_rat"),
    ("an unknown key at the top", {**_grpo(), "unknown_top_level": 1}, "unknown_top_level"),
    ("a negative beta", _grpo(beta=-0.1), "method.grpo.beta"),
    ("a text for a number", _grpo(limits={"num_steps": "7"}), "method.grpo.limits.num_steps"),
    ("true for a number", _grpo(limits={"num_steps": True}), "method.grpo.limits.num_steps"),
    ("no method", {"model": "tiny", "training_file": "file-x"}, "method"),
    ("another method", {**_grpo(), "method": {"type": "dpo"}}, "method.type"),
    ("an unknown model", {**_grpo(), "model": "gpt-99"}, "model"),
    ("a model no disk could hold", {**_grpo(), "model": "a" * 300}, "model"),
    ("a model outside the folder", {**_grpo(), "model": "/etc"}, "model"),
    ("a model above the folder", {**_grpo(), "model": "../models/tiny/.."}, "model"),
    ("a model by a detour", {**_grpo(), "model": "tiny/../tiny"}, "model"),
    ("a model from here", {**_grpo(), "model": "./tiny"}, "model"),
    ("a model with a stroke behind", {**_grpo(), "model": "tiny/"}, "model"),
    ("a missing file", _grpo(), "training_file"),
    ("a reference that moves beside an adapter", _grpo(adapter={"type": "lora"}, reference={"sync_every": 2}), _SYNC),
]


@pytest.mark.parametrize(("body", "param"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_spec_names_its_field_and_nothing_is_created(
    shared_client: httpx.Client, shared_server: Server, body: dict[str, Any], param: str
) -> None:
    answer = shared_client.post(JOBS, json=body)
    problem = answer.json()
    assert 400 <= answer.status_code < 500, problem
    assert problem["error"]["param"] == param
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["status"] == answer.status_code
    assert problem["detail"] == problem["error"]["message"]
    assert shared_client.get(JOBS).json()["data"] == []
    assert list((shared_server.settings.data_dir / "jobs").iterdir()) == []


def test_the_nearest_key_is_offered(shared_client: httpx.Client) -> None:
    message = shared_client.post(JOBS, json=_grpo(optimizer={"learning_rat": 1e-5})).json()["detail"]
    assert "learning_rate" in message


def test_a_template_the_rows_cannot_fill_is_refused(client: httpx.Client) -> None:
    grader = {"type": "string_check", "reference": "{{item.solution}}", "operation": "eq"}
    answer = client.post(JOBS, json=spec(upload(client), grader=grader))
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "method.grpo.grader.reference"
    assert "'answer'" in answer.json()["detail"]


def test_a_deleted_file_is_refused_and_an_old_job_keeps_its_rows(client: httpx.Client, server: Server) -> None:
    file_id = upload(client)
    job_id = client.post(JOBS, json=spec(file_id)).json()["id"]
    assert client.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
    assert client.post(JOBS, json=spec(file_id)).json()["error"]["param"] == "training_file"
    kept = server.settings.data_dir / "jobs" / job_id / "inputs" / "training.jsonl"
    assert kept.read_bytes() == jsonl(ROWS)


def test_a_table_keeps_its_ending(client: httpx.Client, server: Server) -> None:
    content = b"prompt,answer\n1 + 1 = ,2\n"
    answer = client.post(JOBS, json=spec(upload(client, content, "sums.csv")))
    assert answer.status_code == 201, answer.text
    inputs = server.settings.data_dir / "jobs" / answer.json()["id"] / "inputs"
    assert [path.name for path in inputs.iterdir()] == ["training.csv"]


def test_validate_creates_nothing(client: httpx.Client) -> None:
    file_id = upload(client)
    answer = client.post(f"{JOBS}/validate", json=spec(file_id))
    assert answer.status_code == 200
    assert answer.json()["rows"] == len(ROWS)
    assert answer.json()["resolved"]["method"]["grpo"]["kl"]["grad"] == "unbiased"
    assert answer.json()["disk_bytes_needed"] > 0
    assert client.get(JOBS).json()["data"] == []


def test_reinforcement_is_translated(client: httpx.Client) -> None:
    method = {
        "type": "reinforcement",
        "reinforcement": {"grader": spec("x")["method"]["grpo"]["grader"], "hyperparameters": {"kl_coef": 0.3, "learning_rate": 1e-5}},
    }
    answer = client.post(JOBS, json={"model": "tiny", "training_file": upload(client), "method": method})
    assert answer.status_code == 201, answer.text
    assert answer.json()["resolved"]["beta"] == {"rule": "fixed", "value": 0.3}
    assert answer.json()["resolved"]["optimizer"]["learning_rate"] == 1e-5


class TestIdempotency:
    def test_the_same_key_returns_the_first_job(self, client: httpx.Client) -> None:
        body = spec(upload(client))
        first, second = (client.post(JOBS, json=body, headers={"idempotency-key": "k"}) for _ in range(2))
        assert first.status_code == 201
        assert second.status_code == 200
        assert second.headers["idempotency-replayed"] == "true"
        assert first.json()["id"] == second.json()["id"]

    def test_the_order_of_keys_does_not_matter(self, client: httpx.Client) -> None:
        body = spec(upload(client))
        turned = dict(reversed(body.items()))
        ids = {client.post(JOBS, content=json.dumps(b), headers={"idempotency-key": "k", "content-type": "application/json"}).json()["id"]
               for b in (body, turned)}  # fmt: skip
        assert len(ids) == 1

    def test_another_body_is_refused(self, client: httpx.Client) -> None:
        body = spec(upload(client))
        client.post(JOBS, json=body, headers={"idempotency-key": "k"})
        answer = client.post(JOBS, json={**body, "seed": 3}, headers={"idempotency-key": "k"})
        assert answer.status_code == 422
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("idempotency_key_reused", "idempotency-key")
        by_address = client.put(f"{JOBS}/by-key/k", json={**body, "seed": 3})
        assert (by_address.json()["error"]["code"], by_address.json()["error"]["param"]) == ("idempotency_key_reused", "key")
        assert by_address.json()["detail"].startswith("this key was used for job")
        assert (client.put(f"{JOBS}/by-key/", json=body).status_code, client.put(f"{JOBS}/by-key/k", json=body).status_code) == (422, 200)
        assert len(client.get(JOBS).json()["data"]) == 1

    def test_without_a_key_two_requests_are_two_jobs(self, client: httpx.Client) -> None:
        body = spec(upload(client))
        assert len({client.post(JOBS, json=body).json()["id"] for _ in range(2)}) == 2

    def test_twenty_at_once_make_one_job(self, server: Server, client: httpx.Client) -> None:
        body = spec(upload(client))

        def post(_: int) -> tuple[int, str]:
            with server.client() as own:
                answer = own.post(JOBS, json=body, headers={"idempotency-key": "together"})
                return answer.status_code, answer.json().get("id", "")

        with ThreadPoolExecutor(10) as threads:
            answers = list(threads.map(post, range(20)))
        assert {status for status, _ in answers} <= {200, 201}
        assert len({job_id for _, job_id in answers}) == 1
        assert len(client.get(JOBS).json()["data"]) == 1
        assert len(list((server.settings.data_dir / "jobs").iterdir())) == 1

    def test_put_by_key_is_the_same_key(self, client: httpx.Client) -> None:
        body = spec(upload(client))
        first = client.put(f"{JOBS}/by-key/nightly-7", json=body)
        again = client.put(f"{JOBS}/by-key/nightly-7", json=body)
        posted = client.post(JOBS, json=body, headers={"idempotency-key": "nightly-7"})
        assert (first.status_code, again.status_code, posted.status_code) == (201, 200, 200)
        assert len({answer.json()["id"] for answer in (first, again, posted)}) == 1

    def test_a_retry_of_the_sdk_after_a_delivered_answer_is_a_new_job(self, server: Server, client: httpx.Client) -> None:
        body = spec(upload(client))
        first = client.post(JOBS, json=body, headers={"x-stainless-retry-count": "0"})
        database = server.app.state.services.ledger.database
        eventually(lambda: retries.undelivered(database, "local", body) is None)
        again = client.post(JOBS, json=body, headers={"x-stainless-retry-count": "1"})
        assert first.json()["id"] != again.json()["id"]

    def test_a_retry_of_the_sdk_after_a_lost_answer_is_the_same_job(self, server: Server, client: httpx.Client) -> None:
        body = spec(upload(client))
        services = server.app.state.services
        admission = admit(body, services)
        lost = services.ledger.create_job(
            admission.spec, training_path=admission.training_path, idempotency=retries.new_mark("local", body)
        )
        again = client.post(JOBS, json=body, headers={"x-stainless-retry-count": "1"})
        assert again.json()["id"] == lost.id


class TestListing:
    def test_pages_show_every_job_once_while_more_arrive(self, client: httpx.Client) -> None:
        body = spec(upload(client))
        made = [client.post(JOBS, json=body).json()["id"] for _ in range(12)]
        seen: list[str] = []
        after = None
        while True:
            page = client.get(JOBS, params={"limit": 5, **({"after": after} if after else {})}).json()
            seen += [job["id"] for job in page["data"]]
            client.post(JOBS, json=body)
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert seen == list(reversed(made))

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=-1", "limit=101", "limit=abc", "after=ftjob-none", "order=up", "status=odd", "limt=3"]
    )
    def test_a_bad_query_names_its_parameter(self, shared_client: httpx.Client, query: str) -> None:
        answer = shared_client.get(f"{JOBS}?{query}")
        assert answer.status_code == 422
        assert answer.json()["error"]["param"] == query.partition("=")[0]

    def test_filters(self, client: httpx.Client) -> None:
        body = spec(upload(client))
        a = client.post(JOBS, json={**body, "metadata": {"team": "a"}}).json()["id"]
        b = client.post(JOBS, json={**body, "metadata": {"team": "b"}}).json()["id"]
        client.post(f"{JOBS}/{a}/cancel")
        assert [job["id"] for job in client.get(JOBS, params={"metadata[team]": "a"}).json()["data"]] == [a]
        assert [job["id"] for job in client.get(JOBS, params={"status": "cancelled"}).json()["data"]] == [a]
        assert [job["id"] for job in client.get(JOBS, params={"status": "queued"}).json()["data"]] == [b]
        assert client.get(JOBS, params={"status": "validating_files"}).json()["data"] == []


class TestStopping:
    def test_cancel_is_idempotent_and_final(self, client: httpx.Client) -> None:
        job_id = create(client)
        for _ in range(2):
            answer = client.post(f"{JOBS}/{job_id}/cancel")
            assert answer.status_code == 200
            assert answer.json()["status"] == "cancelled"
            assert answer.json()["phase"] == "terminal"
            assert answer.json()["finished_at"] is not None
        conflict = client.post(f"{JOBS}/{job_id}/pause")
        assert conflict.status_code == 409
        assert conflict.headers["x-should-retry"] == "false"

    def test_pause_and_resume_a_queued_job(self, client: httpx.Client) -> None:
        job_id = create(client)
        assert client.post(f"{JOBS}/{job_id}/pause").json()["status"] == "paused"
        assert client.post(f"{JOBS}/{job_id}/resume").json()["status"] == "queued"

    def test_cancel_of_a_running_job_shows_as_cancelling(self, client: httpx.Client, hand: Hand) -> None:
        job_id = create(client)
        hand.start(job_id)
        job = client.post(f"{JOBS}/{job_id}/cancel").json()
        assert (job["status"], job["phase"]) == ("running", "cancelling")

    def test_the_outcome_waits_for_the_end(self, client: httpx.Client) -> None:
        job_id = create(client)
        early = client.get(f"{JOBS}/{job_id}/outcome")
        assert (early.status_code, early.json()["error"]["code"]) == (404, "job_not_finished")
        client.post(f"{JOBS}/{job_id}/cancel")
        assert client.get(f"{JOBS}/{job_id}/outcome").json()["status"] == "cancelled"


class TestReading:
    def test_an_unknown_job_is_404(self, client: httpx.Client) -> None:
        for path in ("", "/events", "/metrics", "/checkpoints", "/control", "/outcome", "/logs", "/metrics/stream", "/events/stream"):
            answer = client.get(f"{JOBS}/ftjob-none{path}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "job_id")
        missing = client.get(f"{JOBS}/{create(client)}/checkpoints/ftckpt-none")
        assert missing.json()["error"]["param"] == "checkpoint_id"

    def test_etag_and_304(self, client: httpx.Client) -> None:
        job_id = create(client)
        first = client.get(f"{JOBS}/{job_id}")
        same = client.get(f"{JOBS}/{job_id}", headers={"if-none-match": first.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")
        for spelled in (f"W/{first.headers['etag']}", f'"other", {first.headers["etag"]}', "*"):
            assert client.get(f"{JOBS}/{job_id}", headers={"if-none-match": spelled}).status_code == 304
        client.post(f"{JOBS}/{job_id}/pause")
        assert client.get(f"{JOBS}/{job_id}", headers={"if-none-match": first.headers["etag"]}).status_code == 200

    def test_a_weakened_etag_still_waits(self, server: Server, client: httpx.Client) -> None:
        """A proxy that compresses sends `W/"..."`; answering it at once would turn a long poll into a busy loop."""
        job_id = create(client)
        etag = client.get(f"{JOBS}/{job_id}").headers["etag"]
        with ThreadPoolExecutor(1) as threads, server.client() as other:
            waiting = threads.submit(other.get, f"{JOBS}/{job_id}", params={"wait": 30}, headers={"if-none-match": f"W/{etag}"})
            client.post(f"{JOBS}/{job_id}/pause")
            assert waiting.result(20).json()["status"] == "paused"

    def test_wait_answers_when_the_state_changes(self, server: Server, client: httpx.Client, hand: Hand) -> None:
        job_id = create(client)
        with ThreadPoolExecutor(1) as threads, server.client() as other:
            waiting = threads.submit(lambda: other.get(f"{JOBS}/{job_id}", params={"wait": 30}).json())
            hand.start(job_id)
            assert waiting.result(20)["status"] in ("queued", "running")
            assert client.get(f"{JOBS}/{job_id}", params={"wait": 0}).json()["status"] == "running"

    def test_progress_and_kl_of_a_running_job(self, client: httpx.Client, hand: Hand) -> None:
        job_id = create(client)
        epoch = hand.start(job_id)
        hand.ingest(job_id, step_event(epoch, 1, 1), step_event(epoch, 2, 2, **{"kl/ref/k3/mean": float("nan")}))
        answer = client.get(f"{JOBS}/{job_id}")
        job = json.loads(answer.content, parse_constant=lambda name: pytest.fail(f"{name} on the wire"))
        assert job["progress"]["step"] == 2
        assert job["kl"]["ref_kl"] == {"value": None, "nonfinite": "nan"}
        assert job["kl"]["beta"] == 0.04
        assert job["kl"]["target"] == 0.1
        assert job["kl"]["reference"] == {"model": "tiny", "sha256": "a" * 64}
        assert job["estimated_finish"] == 1_700_000_000 + 2 + 16


def test_a_full_disk_refuses_a_job_that_needs_more(api_settings: Settings, limits: StreamLimits) -> None:
    full = Server(replace(api_settings, min_free_bytes=2**60), limits)
    try:
        with full.client() as client:
            answer = client.post("/v1/files", files={"file": ("a.jsonl", jsonl(ROWS))}, data={"purpose": "fine-tune"})
            assert answer.status_code == 507
            assert client.get(JOBS).status_code == 200
    finally:
        full.stop()


def test_places_in_the_queue(client: httpx.Client, hand: Hand) -> None:
    body = spec(upload(client))
    ids = [client.post(JOBS, json=body).json()["id"] for _ in range(3)]
    shown = {job["id"]: job["queue"] for job in client.get(JOBS).json()["data"]}
    assert [shown[job_id]["position"] for job_id in ids] == [1, 2, 3]
    hand.start(ids[0])
    eventually(lambda: client.get(f"{JOBS}/{ids[1]}").json()["queue"]["position"] == 1)
    assert client.get(f"{JOBS}/{ids[0]}").json()["queue"] is None
