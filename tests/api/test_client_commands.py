"""The client and its commands against a real server: every newer route, in words, in JSON, and with the exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli import app
from api.client import ApiError, AsyncGrpo, Grpo
from api.client.terminal import console
from jobs.settings import Settings
from tests.api.conftest import Hand, Server, create, spec, step_event
from tests.api.test_fork import save
from tests.api.test_rollouts import keep
from tests.api.test_webhooks import Subscriber, subscriber


@pytest.fixture
def api_settings(api_settings: Settings) -> Settings:
    return replace(api_settings, webhook_allow_private=True)


@pytest.fixture
def grpo(server: Server) -> Iterator[Grpo]:
    with Grpo(server.url) as client:
        yield client


class Shell:
    """`grpo WORDS` in this process, against one server, at 80 columns and without colour."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runner = CliRunner(env={"GRPO_BASE_URL": url, "COLUMNS": "80", "NO_COLOR": "1"})
        monkeypatch.setattr(console, "_width", 80)

    def __call__(self, *words: str, code: int = 0) -> str:
        answer = self._runner.invoke(app, list(words))
        assert answer.exit_code == code, (answer.output, answer.exception)
        return answer.stdout

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))


@pytest.fixture
def shell(server: Server, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(server.url, monkeypatch)


@pytest.fixture
def done(server: Server, hand: Hand) -> str:
    """A finished job of three steps, with a checkpoint that is whole on disk."""
    with server.client() as client:
        job_id = create(client)
    epoch = hand.start(job_id)
    hand.ingest(job_id, *(step_event(epoch, n, n) for n in (1, 2, 3)))
    save(hand, server, job_id, epoch, 4, 3)
    hand.finish(job_id)
    return job_id


def test_studies_of_a_finished_job(shell: Shell, done: str) -> None:
    shown = shell("checkpoints", done)
    assert "0.02" in shown
    checkpoint = shell.json("checkpoints", done)[0]["id"]
    assert checkpoint in shown

    compared = shell("compare", done)
    assert "kl/ref/k3/mean" in compared
    assert checkpoint in compared
    assert shell.json("compare", done, "--align", "kl")["align"] == "kl"
    assert shell.json("compare", done, "--name", "reward/mean")["data"][0]["series"][0]["name"] == "reward/mean"

    assert "step 1  fired    ref_mismatch" in shell("guardrails", done)
    assert shell.json("guardrails", done)["num_steps"] == 3

    assert "passed max_ref_kl 0.1" in shell("promote", done, "3", "--max-ref-kl", "0.1", "--note", "good")
    assert "promoted" in shell("checkpoints", done)
    shell("promote", done, "3", "--max-ref-kl", "0.001", code=1)
    assert "stays pinned" in shell("promote", done, "3", "--withdraw")
    assert shell.json("pin", done, "step-000003", "--off")["pinned"] is False
    assert shell.json("pin", done, checkpoint)["pinned"] is True

    assert shell("rollouts", done, code=1) == ""


def test_rules_from_a_file_and_files_that_are_none(shell: Shell, done: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text('{"diagnostics": {"kl_out_of_control": {"kl": 0.005}}}')
    assert shell.json("guardrails", done, "--rules", str(rules))["job_id"] == done
    rules.write_text('{"diagnostic": {}}')
    shell("guardrails", done, "--rules", str(rules), code=1)


def test_rollouts_read_as_text(shell: Shell, server: Server, hand: Hand) -> None:
    with server.client() as client:
        job_id = create(client)
    epoch = hand.start(job_id)
    keep(server, job_id, epoch, 1)
    hand.ingest(job_id, step_event(epoch, 1, 1))
    shown = shell("rollouts", job_id, "--limit", "2")
    assert "step 1, attempt 1: 2 of 3 completions" in shown
    assert f"more: grpo rollouts {job_id} --step 1 --after 1" in shown
    assert len(shell.json("rollouts", job_id, "--after", "1")["data"]) == 1


def test_a_fork_and_a_sweep_are_made_once(shell: Shell, grpo: Grpo, server: Server, tmp_path: Path) -> None:
    rows, job = tmp_path / "rows.jsonl", tmp_path / "job.json"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(16)))
    job.write_text(json.dumps({**spec("file-later"), "seed": 7}))
    assert shell("validate", str(job), "--training-file", str(rows)).startswith("valid: 16 rows")

    words = ("sweep", "create", str(job), "--training-file", str(rows), "--beta", "0.01", "--beta", "0.1", "--name", "betas")
    made = shell.json(*words)
    assert [member["name"] for member in made["data"]] == ["beta=0.01", "beta=0.1"]
    assert made["id"] in shell("sweep", "list")
    assert "beta=0.1" in shell("sweep", "show", made["id"])
    assert {member["status"] for member in shell.json("sweep", "pause", made["id"])["data"]} == {"paused"}
    assert {member["status"] for member in shell.json("sweep", "resume", made["id"])["data"]} == {"queued"}
    assert shell.json("sweep", "cancel", made["id"])["is_terminal"] is True
    shell("sweep", "create", str(job), code=1)

    request = {"spec": {**spec(grpo.files()[0].id)}, "variants": [{"beta": 0.1}, {"beta": 0.2}]}
    first = grpo.create_sweep(request, idempotency_key="once")
    assert grpo.create_sweep(request, idempotency_key="once").id == first.id


def test_a_fork_of_a_job_goes_on_from_its_checkpoint(shell: Shell, server: Server, done: str) -> None:
    words = ("fork", done, "--beta", "0.2", "--checkpoint", "3", "--suffix", "harder", "--idempotency-key", "fork-1")
    made = shell.json(*words)
    assert (made["lineage"]["parent_job"], made["resolved"]["beta"]["value"], made["user_provided_suffix"]) == (done, 0.2, "harder")
    assert shell.json(*words)["id"] == made["id"]
    assert "follow it with: grpo watch" in shell("fork", done)
    assert shell("fork", done, "--overrides", "{", code=1) == ""


def test_graders(shell: Shell, tmp_path: Path) -> None:
    grader = tmp_path / "grader.json"
    grader.write_text(json.dumps({"type": "string_check", "reference": "{{item.answer}}", "operation": "eq"}))
    assert shell("graders", "run", str(grader), "--sample", "4", "--item", '{"answer": "4"}').startswith("reward 1")
    assert shell.json("graders", "run", str(grader), "--sample", "5", "--item", '{"answer": "4"}')["reward"] == 0.0
    assert "string_check" in shell("graders", "validate", str(grader))
    grader.write_text(json.dumps(spec("file-1")))
    assert shell.json("graders", "validate", str(grader))["grader"]["type"] == "string_check"
    shell("graders", "run", str(grader), "--sample", "4", "--item", "[]", code=1)


@pytest.fixture
def hook() -> Iterator[Subscriber]:
    with subscriber() as state:
        yield state


def test_webhooks(shell: Shell, hook: Subscriber) -> None:
    shown = shell("webhooks", "create", "ci", hook.url, "--event", "succeeded")
    assert "whsec_" in shown
    endpoint = shell.json("webhooks", "list")[0]
    assert endpoint["event_types"] == ["fine_tuning.job.succeeded"]
    assert endpoint["id"] in shown
    assert "answered 200" in shell("webhooks", "test", endpoint["id"])
    assert len(hook.got) == 1
    hook.statuses.append(500)
    assert shell.json("webhooks", "test", endpoint["id"], "--event", "failed", code=1)["status_code"] == 500
    log = shell.json("webhooks", "deliveries", endpoint["id"], "--status", "failed")
    assert [one["status"] for one in log] == ["failed"]
    assert log[0]["id"] in shell("webhooks", "deliveries", endpoint["id"])
    assert "pending again" in shell("webhooks", "redeliver", endpoint["id"], log[0]["id"])
    assert shell("webhooks", "rotate", endpoint["id"], "--keep-old").splitlines()[-1].startswith("whsec_")
    assert shell.json("webhooks", "change", endpoint["id"], "--name", "cd")["name"] == "cd"
    assert "nothing more" in shell("webhooks", "delete", endpoint["id"])
    assert shell.json("webhooks", "list") == []
    assert shell("webhooks", "create", "ci", hook.url, "--event", "finished", code=2) == ""
    assert "fine_tuning.job.failed" in shell("webhooks", "types")


def test_the_asynchronous_client_says_the_same(server: Server, grpo: Grpo, done: str) -> None:
    async def ask() -> list[Any]:
        async with AsyncGrpo(server.url) as client:
            with pytest.raises(ApiError, match="no job"):
                await client.outcome("ftjob-unknown")
            return [
                await client.outcome(done),
                await client.compare([done]),
                await client.integrity(done),
                await client.replay_guardrails(done),
                await client.metrics_csv(done, ["reward/mean"]),
                await client.checkpoints(done),
                await client.sweeps(),
                await client.webhooks(),
                await client.models(),
                await client.files(),
            ]

    assert asyncio.run(ask()) == [
        grpo.outcome(done),
        grpo.compare([done]),
        grpo.integrity(done),
        grpo.replay_guardrails(done),
        grpo.metrics_csv(done, ["reward/mean"]),
        grpo.checkpoints(done),
        grpo.sweeps(),
        grpo.webhooks(),
        grpo.models(),
        grpo.files(),
    ]


def test_csv_of_more_steps_than_a_page(grpo: Grpo, done: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = grpo.metrics_csv(done, ["reward/mean"])
    monkeypatch.setattr("api.client.sync.CSV_STEPS", 2)
    assert grpo.metrics_csv(done, ["reward/mean"]) == whole
    assert len(whole.splitlines()) == 4
