"""…/rollouts and the held-out file at create: what is shown is the run of the step that counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from jobs.dispatcher.intake import dispatch_json
from jobs.dispatcher.retention import Retention
from tests.api.conftest import ROWS, Hand, Server, create, event, jsonl, spec, step_event, upload

JOBS = "/v1/fine_tuning/jobs"


def keep(server: Server, job_id: str, epoch: int, step: int, count: int = 3) -> Path:
    """Write a step's completions as the engine does."""
    lines = [
        {"index": index, "row": 0, "prompt": "1+1=", "completion": f"{epoch}/{step}/{index}", "num_prompt_tokens": 4, "num_tokens": 1,
         "is_truncated": False, "reward": {"value": None, "nonfinite": "nan"} if index == 1 else 1.0, "parts": {"a": 1.0}, "advantage": 0.5,
         "kl": 0.0, "token_ids": [5], "token_texts": ["2"], "token_logprobs": [-0.5], "token_kl": [0.0],
         **({"reference": {"completion": "3", "num_tokens": 1, "is_truncated": False, "num_same_tokens": 0}} if index == 2 else {})}
        for index in range(count)
    ]  # fmt: skip
    folder = server.settings.data_dir / "jobs" / job_id / "attempts" / str(epoch) / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def shown(client: httpx.Client, job_id: str, **params: Any) -> dict[str, Any]:
    answer = client.get(f"{JOBS}/{job_id}/rollouts", params=params)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_a_step_is_paged_in_order(client: httpx.Client, hand: Hand, server: Server) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    for step in (1, 2):
        keep(server, job_id, epoch, step)
        hand.ingest(job_id, step_event(epoch, step, step))
    first = shown(client, job_id, step=1, limit=2)
    assert [one["completion"] for one in first["data"]] == ["1/1/0", "1/1/1"]
    assert (first["has_more"], first["num_completions"], first["attempt"]) == (True, 3, 1)
    assert first["data"][1]["reward"] == {"value": None, "nonfinite": "nan"}
    rest = shown(client, job_id, step=1, limit=2, after=1)
    assert ([one["index"] for one in rest["data"]], rest["has_more"]) == ([2], False)
    assert rest["data"][0]["reference"] == {"completion": "3", "num_tokens": 1, "is_truncated": False, "num_same_tokens": 0}
    assert [one["reference"] for one in first["data"]] == [None, None], "files from before the reference was asked are read as well"
    assert shown(client, job_id)["step"] == 2, "the latest step without a step"


def test_the_run_of_a_step_that_counts_is_shown(client: httpx.Client, hand: Hand, server: Server) -> None:
    """Attempt 1 did steps 1 to 3 and was lost; attempt 2 went back to 1 and has done 2 so far."""
    job_id = create(client)
    first = hand.start(job_id)
    for step in (1, 2, 3):
        keep(server, job_id, first, step)
        hand.ingest(job_id, step_event(first, step, step))
    hand.finish(job_id, "queued")
    second = hand.start(job_id)
    keep(server, job_id, second, 2)
    hand.ingest(job_id, event(second, 1, "run.rewound", None, to_step=1), step_event(second, 2, 2))
    assert [shown(client, job_id, step=step)["attempt"] for step in (1, 2)] == [1, 2]
    assert shown(client, job_id)["data"][0]["completion"] == "2/2/0"
    assert client.get(f"{JOBS}/{job_id}/rollouts", params={"step": 3}).status_code == 404


def test_all_attempts_together_keep_so_many_steps(client: httpx.Client, hand: Hand, server: Server) -> None:
    job_id = create(client, telemetry={"rollouts_keep": 3})
    first = hand.start(job_id)
    for step in (1, 2, 3, 4):
        keep(server, job_id, first, step)
    hand.finish(job_id, "queued")
    second = hand.start(job_id)
    for step in (4, 5):
        keep(server, job_id, second, step)
    Retention(hand.ledger).sweep(hand.ledger.get_job(job_id))
    artifacts = hand.ledger.artifacts
    assert (artifacts.rollout_steps(job_id, first), artifacts.rollout_steps(job_id, second)) == ([4], [4, 5])


def test_what_is_not_there_says_why(client: httpx.Client, hand: Hand, server: Server) -> None:
    job_id = create(client)
    assert client.get(f"{JOBS}/{job_id}/rollouts").json()["error"]["code"] == "rollouts_not_kept"
    assert client.get(f"{JOBS}/ftjob-none/rollouts").status_code == 404
    epoch = hand.start(job_id)
    hand.ingest(job_id, step_event(epoch, 1, 1))
    missing = client.get(f"{JOBS}/{job_id}/rollouts", params={"step": 1})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "rollouts_not_kept")
    keep(server, job_id, epoch, 1).write_bytes(b"broken")
    damaged = client.get(f"{JOBS}/{job_id}/rollouts", params={"step": 1})
    assert (damaged.status_code, damaged.json()["error"]["code"]) == (409, "rollouts_damaged")


EVALUATION = {"evaluation": {"every": 5, "grader": {"type": "string_check", "reference": "{{item.gold}}", "operation": "eq"}}}


def test_a_held_out_file_is_linked_and_dispatched(client: httpx.Client, hand: Hand, server: Server) -> None:
    held_out = upload(client, jsonl([{**row, "gold": row["answer"]} for row in ROWS]), "held_out.jsonl")
    body = {**spec(upload(client), **EVALUATION), "validation_file": held_out}
    job = client.post(JOBS, json=body)
    assert job.status_code == 201, job.text
    assert job.json()["validation_file"] == held_out
    client.delete(f"/v1/files/{held_out}").raise_for_status()
    record = hand.ledger.get_job(job.json()["id"])
    path = json.loads(dispatch_json(record))["validation_file"]
    assert b'"gold"' in (server.settings.data_dir / "jobs" / record.id / path).read_bytes()


@pytest.mark.parametrize(
    ("content", "grader", "param", "words"),
    [
        (jsonl(ROWS), EVALUATION, "method.grpo.evaluation.grader.reference", "item.gold"),
        (jsonl([{"prompt": "2 + 2 = "}]), {"evaluation": {"every": 5}}, "validation_file", "item.answer"),
        (jsonl([{"prompt": 3, "answer": "4"}]), {"evaluation": {"every": 5}}, "validation_file", "line 1"),
        (None, {"evaluation": {"every": 5}}, "validation_file", "does not exist"),
    ],
)
def test_a_held_out_file_that_cannot_be_graded_is_refused(
    client: httpx.Client, content: bytes | None, grader: dict[str, Any], param: str, words: str
) -> None:
    held_out = "file-none" if content is None else upload(client, content, "held_out.jsonl")
    answer = client.post(JOBS, json={**spec(upload(client), **grader), "validation_file": held_out})
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_a_held_out_file_nothing_reads_is_refused(client: httpx.Client) -> None:
    answer = client.post(JOBS, json={**spec(upload(client)), "validation_file": upload(client)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "validation_file")
