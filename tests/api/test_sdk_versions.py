"""One application, three generations of the openai SDK: the script of tests/conformance against one server.

The installed SDK is tried every time. Older ones are slow tests: each gets a virtual environment below pytest's cache directory
(`-o cache_dir=DIR` moves it), made once and used again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from jobs.dispatcher.courier import Courier
from jobs.settings import Settings
from tests.api.conftest import Hand, Server, create, step_event
from tests.api.test_checkpoints import publish
from tests.api.test_webhooks import settled, subscribe, subscriber

SCRIPT = Path(__file__).parents[1] / "conformance" / "openai_script.py"
OLDER = ("1.109.1", "2.54.0")
EVERY_CHECK = {
    "files", "jobs", "pause_and_resume", "reinforcement", "events_and_checkpoints", "models", "graders", "errors", "streams", "webhooks",
}  # fmt: skip


@pytest.fixture
def api_settings(api_settings: Settings) -> Settings:
    return replace(api_settings, webhook_allow_private=True, webhook_retry_s=0.01)


@pytest.fixture
def arguments(server: Server, hand: Hand, api_settings: Settings, tmp_path: Path) -> list[str]:
    """Of the script: a server with a finished job, and what a subscriber was told of it."""
    courier = Courier(hand.ledger, api_settings)
    with server.client() as client, subscriber() as hook:
        endpoint = subscribe(client, hook, "fine_tuning.job.succeeded")
        job_id = create(client)
        epoch = hand.start(job_id)
        for step in (1, 2):
            hand.ingest(job_id, step_event(epoch, 2 * step - 1, step))
            publish(hand, server, job_id, epoch, 2 * step, step)
        hand.finish(job_id)
        settled(client, courier, endpoint)
        headers, body = hook.got[0]
    courier.close()
    told: dict[str, Any] = {"finished_job": job_id, "headers": headers, "body": body.decode()}
    (tmp_path / "told.json").write_text(json.dumps(told))
    return [f"{server.url}/v1", endpoint["signing_secret"], str(tmp_path / "told.json")]


def run(python: Path, arguments: list[str]) -> dict[str, Any]:
    answer = subprocess.run([python, "-I", SCRIPT, *arguments], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def python_with(version: str, directory: Path) -> Path:
    """An interpreter that has this SDK, from `directory` where it was made before."""
    python = directory / "bin" / "python"
    ready = directory / "ready"
    if not ready.exists():
        venv.EnvBuilder(clear=True, symlinks=True).create(directory)
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet", f"openai=={version}"]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=300)
        ready.touch()
    return python


def test_the_installed_sdk_does_all_of_it(arguments: list[str]) -> None:
    found = run(Path(sys.executable), arguments)
    assert (found["version"], set(found["checks"])) == (openai.__version__, EVERY_CHECK)


@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER)
def test_an_older_sdk_does_all_of_it(version: str, arguments: list[str], pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    found = run(python_with(version, pytestconfig.cache.mkdir(f"openai-{version}")), arguments)
    assert (found["version"], set(found["checks"])) == (version, EVERY_CHECK)
