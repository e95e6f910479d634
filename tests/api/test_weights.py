"""Jobs that start from a published checkpoint, or are measured against one: checked byte by byte, then kept whatever happens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.dispatcher.intake import dispatch_json
from jobs.dispatcher.retention import Retention
from tests.api.conftest import Hand, Server, create, spec, upload
from tests.api.test_checkpoints import FILES, JOBS, publish


@pytest.fixture
def saved(client: httpx.Client, hand: Hand, server: Server) -> tuple[str, Path]:
    """(id of a published checkpoint, its folder)."""
    job_id = create(client)
    folder = publish(hand, server, job_id, hand.start(job_id), 1, 5)
    (folder / "manifest.json").write_text("{}")
    return client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"][0]["id"], folder


def post(client: httpx.Client, **changes: Any) -> httpx.Response:
    grpo = changes.pop("grpo", {})
    return client.post(JOBS, json={**spec(upload(client), **grpo), **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("role", ["model", "reference"])
def test_the_job_keeps_the_files_when_the_checkpoint_goes(
    client: httpx.Client, hand: Hand, server: Server, saved: tuple[str, Path], role: str
) -> None:
    checkpoint, folder = saved
    changes = {"model": checkpoint} if role == "model" else {"grpo": {"reference": {"source": f"checkpoint:{checkpoint}"}}}
    answer = post(client, **changes)
    assert answer.status_code == 201, answer.text
    job_id = answer.json()["id"]
    client.delete(f"{JOBS}/{folder.parents[3].name}/checkpoints/{checkpoint}").raise_for_status()
    assert not folder.exists()
    Retention(hand.ledger).sweep(hand.ledger.get_job(job_id))
    inputs = server.settings.data_dir / "jobs" / job_id / "inputs" / role
    assert contents(inputs) == {**FILES, "manifest.json": b"{}"}
    dispatch = json.loads(dispatch_json(hand.ledger.get_job(job_id)))
    assert dispatch[f"{role}_from"] == f"inputs/{role}"
    assert dispatch["reference_from" if role == "model" else "model_from"] is None


@pytest.mark.parametrize("role", ["model", "reference"])
@pytest.mark.parametrize("harm", ["unknown", "changed", "missing", "deleted"])
def test_a_checkpoint_that_cannot_be_used_is_refused_by_name(client: httpx.Client, saved: tuple[str, Path], role: str, harm: str) -> None:
    checkpoint, folder = saved
    weights = folder / "model.safetensors"
    if harm == "unknown":
        checkpoint = "ftckpt-" + "0" * 24
    elif harm == "changed":
        weights.write_bytes(b"\x01" + weights.read_bytes()[1:])
    elif harm == "missing":
        weights.unlink()
    else:
        client.delete(f"{JOBS}/{folder.parents[3].name}/checkpoints/{checkpoint}").raise_for_status()
    changes = {"model": checkpoint} if role == "model" else {"grpo": {"reference": {"source": f"checkpoint:{checkpoint}"}}}
    before = client.get(JOBS).json()["data"]
    body = {**spec(upload(client), **changes.pop("grpo", {})), **changes}
    for path in (JOBS, f"{JOBS}/validate"):
        answer = client.post(path, json=body)
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert error["param"] == ("model" if role == "model" else "method.grpo.reference.source")
        assert checkpoint in error["message"]
    assert client.get(JOBS).json()["data"] == before, "nothing is half created"


def test_files_are_copied_where_links_do_not_reach(
    client: httpx.Client, server: Server, saved: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("jobs.weights.os.link", refuse)
    answer = post(client, model=saved[0])
    assert answer.status_code == 201, answer.text
    inputs = server.settings.data_dir / "jobs" / answer.json()["id"] / "inputs" / "model"
    shutil.rmtree(saved[1])
    assert contents(inputs) == {**FILES, "manifest.json": b"{}"}
