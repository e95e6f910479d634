"""The walk through docs/api.md, run as it is written: with curl, OpenAI's SDK and our client, on a job that the test plays."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from standardwebhooks.webhooks import Webhook

from tests.api.conftest import Hand, eventually, step_event
from tests.api.test_checkpoints import publish
from tests.server import Server

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
WALK = TEXT[TEXT.index("## A job, from file to checkpoint") : TEXT.index("## Routes")]
CURL, (SDK, OURS) = re.findall(r"```sh\n(.*?)```", WALK, re.DOTALL)[0], re.findall(r"```python\n(.*?)```", WALK, re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to run in, with the examples of this one."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(here)
    return here


def play(server: Server, hand: Hand, job_id: str) -> None:
    """Start the job, measure three steps, publish the last, and end it."""
    epoch = hand.start(job_id)
    hand.ingest(job_id, *(step_event(epoch, step, step) for step in (1, 2, 3)))
    publish(hand, server, job_id, epoch, 4, 3)
    hand.finish(job_id)


@pytest.fixture
def player(server: Server, client: httpx.Client, hand: Hand) -> Iterator[None]:
    """Plays the first job that has been steered, in a thread."""
    over = threading.Event()

    def steered() -> list[str]:
        jobs = client.get("/v1/fine_tuning/jobs").json()["data"]
        return [job["id"] for job in jobs if client.get(f"/v1/fine_tuning/jobs/{job['id']}/control").json()["commands"]]

    def run() -> None:
        while not over.wait(0.05):
            if found := steered():
                play(server, hand, found[0])
                return

    thread = threading.Thread(target=run)
    thread.start()
    yield
    over.set()
    thread.join()


def run(script: str, server: Server) -> dict[str, Any]:
    """Run Python of the page on this server, with a model it has."""
    names: dict[str, Any] = {"__name__": "walk"}
    exec(compile(here(script, server), "docs/api.md", "exec"), names)
    return names


def here(script: str, server: Server) -> str:
    assert "http://127.0.0.1:8000" in script or "$BASE" in script
    return script.replace("http://127.0.0.1:8000", server.url).replace("smollm2-135m-instruct", "tiny")


def test_with_openais_sdk(server: Server, client: httpx.Client, player: None, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(SDK, server)
    printed = capsys.readouterr().out
    assert "step.completed" in printed or "'step': 3" in printed
    assert client.get(f"/v1/fine_tuning/jobs/{names['job'].id}/control").json()["commands"][0]["beta"] == 0.08
    assert subprocess.run(["tar", "tf", "model.tar"], check=True, capture_output=True, text=True).stdout.count("/model.safetensors\n") == 1
    body = json.dumps({"object": "event", "id": "evt_1", "type": "fine_tuning.job.succeeded", "created_at": 1, "data": {"id": "ftjob-1"}})
    at = datetime.now(UTC)
    signature = Webhook(names["hook"]["signing_secret"]).sign("evt_1", at, body)
    headers = {"webhook-id": "evt_1", "webhook-timestamp": str(int(at.timestamp())), "webhook-signature": signature}
    assert names["received"](body, headers) == "fine_tuning.job.succeeded"
    names["client"].close()


def test_with_our_client(server: Server, player: None, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(OURS, server)
    printed = capsys.readouterr().out
    assert printed.count("step.completed") == 3
    assert "succeeded" in printed
    assert "whsec_" in printed
    assert (place / "model" / "model.safetensors").is_file()
    names["client"].close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands are curl's")
def test_with_curl(server: Server, client: httpx.Client, hand: Hand, place: Path) -> None:
    commands = re.findall(r"^curl .*?(?=\n(?:curl |#|\n|\Z))", CURL, re.DOTALL | re.MULTILINE)
    assert len(commands) == 9
    known: dict[str, str] = {}

    def typed(command: str) -> str:
        text = here(command, server)
        for shown, real in known.items():
            text = text.replace(shown, real)
        script = f"set -o pipefail; BASE={server.url}/v1\n{text}"
        done = subprocess.run(["bash", "-c", script], cwd=place, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    def told(command: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(typed(command))
        assert "error" not in answer or answer["error"] is None, answer
        return answer

    upload, create, steer, stream, wait, metrics, checkpoints, content, webhook = commands
    known["file-..."] = told(upload)["id"]
    known["ftjob-..."] = told(create)["id"]
    assert told(steer)["beta"] == 0.08
    play(server, hand, known["ftjob-..."])
    assert typed(stream).rstrip().endswith("data: [DONE]")
    assert told(wait)["status"] == "succeeded"
    assert [row["step"] for row in told(metrics)["data"]] == [1, 2, 3]
    known["ftckpt-..."] = told(checkpoints)["data"][0]["id"]
    assert typed(content) == ""
    assert [path.name for path in place.glob("*/model.safetensors")] == ["model.safetensors"]
    assert told(webhook)["signing_secret"].startswith("whsec_")
    eventually(lambda: client.get("/v1/webhook_endpoints").json()["data"])
