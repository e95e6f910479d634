"""Going on from a checkpoint as a new job: what it inherits, what overrides change, and what both jobs say about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.ledger import open_ledger
from jobs.rebuild import rebuild
from jobs.settings import Settings
from tests.api.conftest import Hand, Server, create
from tests.api.test_checkpoints import publish

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def parent(client: httpx.Client, hand: Hand, server: Server) -> str:
    """A job on `tiny` with a checkpoint of step 5."""
    job_id = create(client, beta={"rule": "deadband", "value": 0.3, "target": 0.05}, checkpoints={"keep": 3})
    save(hand, server, job_id, hand.start(job_id), 1, 5)
    return job_id


def save(hand: Hand, server: Server, job_id: str, epoch: int, seq: int, step: int) -> None:
    folder = publish(hand, server, job_id, epoch, seq, step)
    (folder / "manifest.json").write_text("{}")


def newest(client: httpx.Client, job_id: str) -> str:
    identity: str = client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"][0]["id"]
    return identity


def fork(client: httpx.Client, job_id: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"{JOBS}/{job_id}/fork", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_a_fork_has_the_settings_but_for_the_overrides_and_the_root_as_reference(client: httpx.Client, parent: str) -> None:
    above = client.get(f"{JOBS}/{parent}").json()
    made = fork(client, parent, overrides={"method": {"grpo": {"beta": {"value": 0.1}}}, "seed": 7}, suffix="low-beta")
    assert made["model"] == newest(client, parent)
    assert (made["seed"], made["user_provided_suffix"], made["status"]) == (7, "low-beta", "queued")
    assert made["resolved"]["beta"] == {**above["resolved"]["beta"], "value": 0.1}
    assert made["resolved"]["reference"]["source"] == "model:tiny"
    same = {key: value for key, value in made["resolved"].items() if key not in ("beta", "reference", "preset")}
    assert same == {key: above["resolved"][key] for key in same}
    assert made["lineage"] == {"root_model": "tiny", "parent_job": parent, "parent_checkpoint": made["model"], "forks": [], "sweep": None}
    above = client.get(f"{JOBS}/{parent}").json()
    assert above["lineage"] == {"root_model": "tiny", "parent_job": None, "parent_checkpoint": None, "forks": [made["id"]], "sweep": None}
    assert client.get(f"{JOBS}/{parent}/events").json()["data"][0]["event"] == "job.forked"


def test_a_fork_of_a_fork_keeps_the_root(client: httpx.Client, hand: Hand, server: Server, parent: str) -> None:
    child = fork(client, parent)
    save(hand, server, child["id"], hand.start(child["id"]), 1, 3)
    grandchild = fork(client, child["id"])
    assert grandchild["resolved"]["reference"]["source"] == "model:tiny"
    assert (grandchild["lineage"]["root_model"], grandchild["lineage"]["parent_job"]) == ("tiny", child["id"])


def test_another_beta_by_any_name_and_another_reference(client: httpx.Client, parent: str) -> None:
    assert fork(client, parent, overrides={"method": {"grpo": {"kl_coef": 0.2}}})["resolved"]["beta"] == {"rule": "fixed", "value": 0.2}
    source = {"method": {"grpo": {"reference": {"source": "initial"}}}}
    assert fork(client, parent, overrides=source)["resolved"]["reference"]["source"] == "initial"


def test_a_named_checkpoint_and_a_deleted_upload(client: httpx.Client, hand: Hand, server: Server, parent: str) -> None:
    first = newest(client, parent)
    save(hand, server, parent, 1, 2, 10)
    training_file = client.get(f"{JOBS}/{parent}").json()["training_file"]
    assert client.delete(f"/v1/files/{training_file}").status_code == 200
    made = fork(client, parent, checkpoint=first)
    assert made["model"] == first
    folder = server.settings.data_dir / "jobs"
    rows = [next(iter((folder / job_id / "inputs").glob("training.*"))).read_bytes() for job_id in (parent, made["id"])]
    assert rows[0] == rows[1] != b""
    assert (folder / made["id"] / "inputs" / "model" / "config.json").is_file()


def test_the_same_idempotency_key_makes_one_fork(client: httpx.Client, parent: str) -> None:
    headers = {"idempotency-key": "f-1"}
    first = client.post(f"{JOBS}/{parent}/fork", json={}, headers=headers)
    second = client.post(f"{JOBS}/{parent}/fork", json={}, headers=headers)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]
    assert client.post(f"{JOBS}/{parent}/fork", json={"suffix": "x"}, headers=headers).json()["error"]["code"] == "idempotency_key_reused"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"checkpoint": "ftckpt-none"}, 422, "checkpoint"),
        ({"overrides": {"model": "tiny"}}, 422, "overrides.model"),
        ({"overrides": {"method": {"grpo": {"bta": 1}}}}, 422, "overrides.method.grpo.bta"),
        ({"overrides": {"method": {"grpo": {"preset": {"name": "dapo"}}}}}, 422, "overrides.method.grpo.preset"),
        ({"overrides": {"method": {"type": "dpo"}}}, 422, "overrides.method"),
        ({"overrides": {"method": {"grpo": {"reference": {"source": "model:none"}}}}}, 422, "overrides.method.grpo.reference.source"),
        ({"overrides": {"training_file": "file-none"}}, 422, "overrides.training_file"),
        ({"suffix": "a b"}, 422, "suffix"),
        ({"sufix": "a"}, 422, "sufix"),
    ],
)
def test_what_cannot_be_forked_names_its_field(client: httpx.Client, parent: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = client.post(f"{JOBS}/{parent}/fork", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert client.get(f"{JOBS}/{parent}").json()["lineage"]["forks"] == []


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(client: httpx.Client) -> None:
    answer = client.post(f"{JOBS}/{create(client)}/fork", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


def test_a_rebuilt_database_knows_the_line(client: httpx.Client, server: Server, parent: str, tmp_path: Path) -> None:
    made = fork(client, parent)
    engine_words = server.settings.data_dir / "jobs" / parent / "attempts" / "1" / "events.jsonl"
    event = json.loads(json.dumps({"epoch": 1, "seq": 1, "time": 1.0, "type": "checkpoint.saved", "step": 5, "message": "saved"}))
    shown = client.get(f"{JOBS}/{parent}/checkpoints").json()["data"][0]
    data = {"name": shown["name"], "step": 5, "kind": "published", "files": shown["files"], "bytes": shown["bytes"]}
    engine_words.write_text(json.dumps({**event, "level": "info", "data": data}) + "\n")
    fresh = open_ledger(Settings(data_dir=server.settings.data_dir, database_url=f"sqlite:///{tmp_path / 'new.db'}").resolved())
    try:
        assert rebuild(fresh).problems == []
        assert fresh.lineages([made["id"]])[made["id"]].parent_job == parent
        assert fresh.lineages([parent])[parent].forks == (made["id"],)
    finally:
        fresh.close()
