"""Sweeps and the probe of a new job in the page, over the real API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis

from grpo_engine.contract.probe_view import Probe
from jobs import keys
from jobs.live import Live
from jobs.probes import ProbeAnswer, WorkerBoard
from jobs.settings import Settings
from tests.browser.stage import OpenPage, Problems, Stage
from tests.server import Server

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = sync_api.expect

ANSWER: dict[str, Any] = Probe.model_json_schema()["examples"][0]


def test_an_empty_list_of_sweeps_leads_to_a_new_one(open_page: OpenPage, stage: Stage, problems: Problems) -> None:
    page = open_page("#/sweeps")
    page.get_by_role("link", name="New sweep").click()
    expect(page.get_by_role("heading", name="New sweep")).to_be_visible()
    expect(page.get_by_text("see the members above.")).to_be_visible()
    problems.allow("422")


def member(page: Any, number: int) -> Any:
    return page.get_by_role("group", name=f"Member {number}", exact=True)


def test_a_sweep_is_written_checked_and_started_by_key_alone(open_page: OpenPage, stage: Stage, problems: Problems) -> None:
    job = stage.job("sums-base", num_steps=30)
    page = open_page(f"#/sweeps/new?from={job.id}")
    accepted = page.get_by_text("The server would accept all 2 jobs: 20 usable rows")
    expect(accepted).to_be_visible()
    expect(page.get_by_label("Settings of a job").locator("option:checked")).to_have_text("sums-base")
    page.get_by_label("Name of the sweep").focus()
    page.keyboard.type("how much KL")
    add = page.get_by_role("button", name="Add a member")
    add.focus()
    page.keyboard.press("Enter")
    third = member(page, 3)
    expect(third.get_by_label("β")).to_be_focused()
    expect(third.get_by_text("Not yet: it changes nothing yet; give it a β, or other changes.")).to_be_visible()
    expect(page.get_by_role("button", name="Start the sweep")).to_be_disabled()
    page.keyboard.type('{"rule": "deadband", "value": 0.02}')
    expect(third.get_by_text("Not yet: method.grpo.beta.target: give exactly one of target and calibration")).to_be_visible()
    third.get_by_label("β").fill('{"rule": "deadband", "value": 0.02, "target": 0.05}')
    third.get_by_label("Name").fill("controller")
    third.get_by_text("Other changes").click()
    third.get_by_label("Overrides as JSON").fill("{")
    expect(third.get_by_text("Not yet: the overrides are no JSON object:")).to_be_visible()
    third.get_by_label("Overrides as JSON").fill('{"method": {"grpo": {"kl": {"estimator": "k2"}}}}')
    expect(page.get_by_text("The server would accept all 3 jobs: 20 usable rows")).to_be_visible()
    start = page.get_by_role("button", name="Start the sweep")
    start.focus()
    page.keyboard.press("Enter")
    members = page.get_by_role("region", name="Members of the sweep")
    expect(members.get_by_role("row")).to_have_count(4)
    expect(members.get_by_role("row").nth(3)).to_contain_text("controller")
    specs = [json.loads(record.spec_json)["method"]["grpo"] for record in stage.ledger.list_jobs(limit=4).data]
    assert sorted(spec["limits"]["num_steps"] for spec in specs) == [30] * 4
    assert [spec["kl"]["estimator"] for spec in specs if spec["beta"]["rule"] == "deadband"] == ["k2"]
    assert {spec["beta"]["value"] for spec in specs} == {0.01, 0.02, 0.04}
    problems.allow("422")


def test_what_only_the_whole_sweep_forbids_is_said_at_the_member(open_page: OpenPage, stage: Stage, problems: Problems) -> None:
    """Each job alone would be accepted; together they would not see the same prompts."""
    page = open_page(f"#/sweeps/new?from={stage.job('sums-base').id}")
    second = member(page, 2)
    second.get_by_text("Other changes").click()
    second.get_by_label("Overrides as JSON").fill('{"seed": 7}')
    expect(second.get_by_text("Would be accepted.")).to_be_visible()
    page.get_by_role("button", name="Start the sweep").click()
    expect(page.get_by_text("The sweep was not started.")).to_be_visible()
    expect(second.get_by_text("the members of a sweep share it")).to_be_visible()
    page.get_by_role("button", name="Add a member").click()
    page.get_by_role("button", name="Remove member 2").click()
    expect(member(page, 2).get_by_label("β")).to_be_focused()
    expect(page.get_by_role("group", name="Member 3", exact=True)).to_have_count(0)
    expect(page.get_by_role("button", name="Remove member 1")).to_be_disabled()
    problems.allow("422")


def test_a_sweep_shows_members_and_frontier_and_is_cancelled_only_when_meant(open_page: OpenPage, server: Server, stage: Stage) -> None:
    spec = {"model": "tiny", "training_file": stage.upload, "method": {"type": "grpo", "grpo": {"grader": GRADER}}}
    body = {"name": "how much KL", "spec": spec, "variants": [{"beta": 0.01}, {"beta": 0.04}]}
    made = httpx.post(f"{server.url}/v1/fine_tuning/sweeps", json=body).raise_for_status().json()
    first = made["data"][0]["job_id"]
    stage.start(first)
    stage.steps(first, 1, 5, **{"reward/mean": 0.375})
    stage.checkpoint(first, 5)
    page = open_page("#/sweeps")
    page.get_by_role("link", name="how much KL").click()
    members = page.get_by_role("region", name="Members of the sweep")
    expect(members.get_by_role("row")).to_have_count(3)
    expect(members.get_by_role("row").nth(1)).to_contain_text("0.375")
    expect(page.get_by_text("Best: beta=0.01, step 5, reward 0.7 at KL 0.021.")).to_be_visible()
    expect(page.get_by_role("figure").locator("path.latest")).to_have_count(1)
    page.get_by_role("button", name="Cancel all").click()
    page.get_by_role("dialog").get_by_role("button", name="Leave it as it is").click()
    assert stage.ledger.get_job(made["data"][1]["job_id"]).status == "queued"
    page.get_by_role("button", name="Cancel all").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel all members").click()
    expect(members.get_by_role("row").nth(2)).to_contain_text("cancelled")


GRADER = {"type": "string_check", "reference": "{{item.answer}}"}


@pytest.fixture
def worker(dashboard_settings: Settings) -> Iterator[None]:
    """A worker that answers one probe."""
    board, live = WorkerBoard(dashboard_settings), Live.connect(dashboard_settings)
    is_over = threading.Event()
    live.worker_heartbeat("trainer-1", {"queues": ["grpo-cpu"], "slots": 1})

    def work() -> None:
        found = None
        with redis.Redis.from_url(dashboard_settings.redis_url, decode_responses=True) as client:
            while found is None and not is_over.is_set():
                live.worker_heartbeat("trainer-1", {"queues": ["grpo-cpu"], "slots": 1})
                found = client.brpop([f"{keys.PREFIX}grpo-cpu"], timeout=1)
        if found is not None:
            probe_id = str(json.loads(found[1])["headers"]["id"])
            assert board.take(probe_id, "trainer-1") is not None
            board.finish(probe_id, ProbeAnswer(ANSWER))

    hand = threading.Thread(target=work)
    hand.start()
    yield
    is_over.set()
    hand.join(10)
    assert not hand.is_alive()
    board.close()
    live.close()


def test_a_new_job_is_tried_before_it_is_created(open_page: OpenPage, jobs: dict[str, str], worker: None) -> None:
    page = open_page(f"#/new?from={jobs['running']}")
    expect(page.get_by_text("The server would accept this job:")).to_be_visible()
    page.get_by_role("button", name="Try its first step").click()
    panel = page.get_by_role("region", name="Before you start it")
    for text in ("3.22 GB", "7.9 s", "13 min 13 s", "KL at step 1", "Equal groups", "50 %", "On trainer-1, cpu in fp32"):
        expect(panel).to_contain_text(text)
    page.get_by_label("Suffix").fill("another")
    expect(panel).to_contain_text("The job was changed since; these numbers are about what it was before.")


def test_without_a_worker_the_page_says_so(open_page: OpenPage, jobs: dict[str, str], problems: Problems) -> None:
    page = open_page(f"#/new?from={jobs['running']}")
    page.get_by_role("button", name="Try its first step").click()
    expect(page.get_by_text("The first step could not be tried.")).to_be_visible()
    problems.allow("409")
