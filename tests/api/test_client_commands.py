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
from grpo_engine.contract.view import Deleted
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


def test_a_job_its_end_and_its_telemetry(shell: Shell, server: Server, hand: Hand, done: str) -> None:
    shown = shell("show", done)
    assert f"job {done} is succeeded (terminal), attempt 1" in shown
    assert "step       3/10" in shown
    assert "kl/ref     0.03  beta 0.04" in shown
    assert shell.json("show", done)["id"] == done
    assert "succeeded after step 3; its weights are ftckpt-" in shell("outcome", done)
    assert shell.json("outcome", done)["status"] == "succeeded"
    assert shell("integrity", done).startswith("whole; 3 steps to step 3, 0 superseded")

    with server.client() as client:
        job_id = create(client, resources={"gpus": 1})
    assert "no live worker serves grpo-gpu" in shell("show", job_id)
    shell("outcome", job_id, code=1)
    epoch = hand.start(job_id)
    hand.ingest(job_id, step_event(epoch, 1, 1), step_event(epoch, 2, 3))
    assert "not whole: 1 steps missing, 0 gaps, the first at step 2" in shell("integrity", job_id, code=1)
    shell("cancel", job_id)
    hand.finish(job_id, "cancelled")
    assert shell.json("outcome", job_id, code=1)["status"] == "cancelled"


def test_a_checkpoint_is_deleted_unless_it_is_pinned(shell: Shell, grpo: Grpo, done: str) -> None:
    checkpoint = grpo.checkpoints(done)[0].id
    grpo.pin(done, checkpoint)
    assert shell("discard", done, "3", code=1) == ""
    grpo.unpin(done, checkpoint)
    assert f"{checkpoint} is gone" in shell("discard", done, "3")
    assert grpo.checkpoints(done) == []


def test_a_file_comes_back_as_it_was_uploaded(shell: Shell, grpo: Grpo, tmp_path: Path) -> None:
    content = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "\u2028", "answer": "\xe9"}\n'
    rows, copy = tmp_path / "rows.jsonl", tmp_path / "copy.jsonl"
    rows.write_text(content, encoding="utf-8")
    file_id = grpo.upload(rows).id
    assert grpo.file(file_id).filename == "rows.jsonl"
    assert shell("files", "--content", file_id) == content
    assert shell.json("files", "--content", file_id, "--to", str(copy))["id"] == file_id
    assert copy.read_bytes() == rows.read_bytes()
    assert shell("files", "--content", file_id, "--to", str(copy), code=1) == "", "what is there is not overwritten"
    assert shell("files", "--content", "file-none", "--to", str(tmp_path / "none"), code=1) == ""
    for words in (("--content", file_id, "--json"), ("--to", str(copy)), ("--content", file_id, "--delete", file_id)):
        assert shell("files", *words, code=1) == ""
    mine = tmp_path / "other.jsonl.part"
    mine.write_text("mine")
    shell("files", "--content", file_id, "--to", str(tmp_path / "other.jsonl"), code=1)
    assert mine.read_text() == "mine"
    mine.unlink()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["copy.jsonl", "rows.jsonl"]
    assert [file.id for file in grpo.files()] == [file_id]


def test_presets_by_name(shell: Shell, grpo: Grpo) -> None:
    assert "recipe_fixed" in shell("presets")
    cards = {card["name"]: card for card in shell.json("presets")}
    assert cards["recipe_fixed"]["config"]["beta"] == {"rule": "fixed", "value": 0.02}
    assert [card.name for card in grpo.presets()] == list(cards)


def test_a_job_of_a_key_is_made_once(grpo: Grpo, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(16)))
    body = spec(grpo.upload(rows).id)
    first = grpo.create_job_by_key("nightly/2026-12-02", body)
    assert grpo.create_job_by_key("nightly/2026-12-02", body).id == first.id
    assert grpo.create_job(body, idempotency_key="nightly/2026-12-02").id == first.id
    with pytest.raises(ApiError) as caught:
        grpo.create_job_by_key("nightly/2026-12-02", {**body, "seed": 9})
    assert caught.value.code == "idempotency_key_reused"
    assert len(grpo.jobs().data) == 1


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
    kept, uploaded = grpo.checkpoints(done), grpo.files()[0].id

    async def ask() -> list[Any]:
        async with AsyncGrpo(server.url) as client:
            with pytest.raises(ApiError, match="no job"):
                await client.outcome("ftjob-unknown")
            with pytest.raises(ApiError, match="no file"):
                await anext(client.read_file("file-none"))
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
                await client.presets(),
                await client.file(uploaded),
                b"".join([piece async for piece in client.read_file(uploaded)]),
                await client.create_job_by_key("once", spec(uploaded)),
            ]

    async def discard() -> Deleted:
        async with AsyncGrpo(server.url) as client:
            return await client.delete_checkpoint(done, kept[0].id)

    assert asyncio.run(ask()) == [
        grpo.outcome(done),
        grpo.compare([done]),
        grpo.integrity(done),
        grpo.replay_guardrails(done),
        grpo.metrics_csv(done, ["reward/mean"]),
        kept,
        grpo.sweeps(),
        grpo.webhooks(),
        grpo.models(),
        grpo.files(),
        grpo.presets(),
        grpo.file(uploaded),
        b"".join(grpo.read_file(uploaded)),
        grpo.create_job_by_key("once", spec(uploaded)),
    ]
    assert asyncio.run(discard()).id == kept[0].id
    assert grpo.checkpoints(done) == []


def test_csv_of_more_steps_than_a_page(grpo: Grpo, done: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = grpo.metrics_csv(done, ["reward/mean"])
    monkeypatch.setattr("api.client.sync.CSV_STEPS", 2)
    assert grpo.metrics_csv(done, ["reward/mean"]) == whole
    assert len(whole.splitlines()) == 4
