"""Query parameters: ranges, numbers, and the words of a refusal say what to do."""

from __future__ import annotations

import httpx
import pytest

from tests.api.conftest import Hand, Server, create, step_event

JOBS = "/v1/fine_tuning/jobs"


def test_created_after_leaves_older_jobs_out(client: httpx.Client, server: Server) -> None:
    ledger = server.app.state.services.ledger
    made = []
    for now in (1000.0, 2000.5, 3000.0):
        ledger.clock = lambda now=now: now
        made.append(create(client))
    client.post(f"{JOBS}/{made[2]}/cancel")

    def listed(**query: str | int) -> list[str]:
        answer = client.get(JOBS, params={"order": "asc", **query})
        assert answer.status_code == 200, answer.text
        return [job["id"] for job in answer.json()["data"]]

    assert listed(created_after=0) == made
    assert listed(created_after=999) == made
    assert listed(created_after=1000) == made[1:]
    assert listed(created_after=2000) == made[1:], "half a second after it: of two jobs of one second none is missed"
    assert listed(created_after=2001) == made[2:]
    assert listed(created_after=3000) == []
    assert listed(created_after=1000, status="queued") == made[1:2]
    assert listed(created_after=1000, after=made[1]) == made[2:]
    page = client.get(JOBS, params={"created_after": 1000, "limit": 1}).json()
    assert ([job["id"] for job in page["data"]], page["has_more"]) == (made[2:], True)
    for wrong in ("-1", "1e3", "1000.0", "yesterday", "", "9" * 30):
        answer = client.get(JOBS, params={"created_after": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "created_after"), wrong


@pytest.mark.parametrize("value", ["1.0", "+5", " 5", "5 ", "1_0", "1e1", "0x5", "\u0665", ""])
def test_a_whole_number_is_written_in_digits(shared_client: httpx.Client, value: str) -> None:
    for path in (JOBS, "/v1/files", f"{JOBS}/ftjob-none/metrics"):
        answer = shared_client.get(path, params={"limit": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "limit"), path
        assert "digits" in answer.json()["detail"]
    assert shared_client.get(JOBS, params={"limit": "005"}).status_code == 200
    assert shared_client.get(f"{JOBS}/ftjob-none", params={"wait": "1.0"}).status_code == 404, "seconds may have a point"


def test_a_range_that_ends_before_it_begins_is_refused(client: httpx.Client, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    hand.ingest(job_id, *(step_event(epoch, n, n) for n in (1, 2, 3)))
    for name in ("global_step", "logged_at"):
        for more in ({}, {"resolution": "2"}, {"names": "reward/mean"}):
            answer = client.get(f"{JOBS}/{job_id}/metrics", params={f"{name}_from": 3, f"{name}_to": 2, **more})
            assert (answer.status_code, answer.json()["error"]["param"]) == (422, f"{name}_from"), (name, more)
            assert f"above {name}_to" in answer.json()["detail"]
    one = client.get(f"{JOBS}/{job_id}/metrics", params={"global_step_from": 2, "global_step_to": 2}).json()
    assert [row["step"] for row in one["data"]] == [2]


def test_a_refusal_says_what_to_do(client: httpx.Client, hand: Hand) -> None:
    def words(answer: httpx.Response) -> str:
        assert answer.status_code in (404, 422)
        text: str = answer.json()["detail"]
        return text

    def hook(url: str) -> str:
        event_types = ["fine_tuning.job.succeeded"]
        return words(client.post("/v1/webhook_endpoints", json={"name": "ci", "url": url, "event_types": event_types}))

    assert "give one that does" in hook("ftp://example.com/")
    assert "give one such as https://" in hook("https:///x")
    assert "give one such as https://" in hook("https://example.com:99999/")
    assert "leave it out" in hook("https://user@example.com/")
    assert "percent-encode" in hook("https://example.com/ä")

    def pattern(text: str) -> str:
        grader = {"type": "regex", "pattern": text}
        return words(client.post("/v1/fine_tuning/alpha/graders/validate", json={"grader": grader}))

    assert "; correct it (its syntax: https://" in pattern("(a")
    assert "grader type 'format'" in pattern("(?=a)")

    job_id = create(client)
    assert "ask again when its first step is done" in words(client.get(f"{JOBS}/{job_id}/rollouts"))
    hand.ingest(job_id, step_event(hand.start(job_id), 1, 1))
    assert "leave step out for the latest" in words(client.get(f"{JOBS}/{job_id}/rollouts", params={"step": 1}))
