"""Downloading a checkpoint: only files its event listed, only as they were written, whole or by range."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import Hand, Server, create, event

JOBS = "/v1/fine_tuning/jobs"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 40,
    "tokenizer.json": b"{}",
    "adapter/adapter_model.safetensors": bytes(range(256)),
}


def publish(hand: Hand, server: Server, job_id: str, epoch: int, seq: int, step: int) -> Path:
    """Write a checkpoint as the engine does, and say so."""
    name = f"step-{step:06d}"
    folder = server.settings.data_dir / "jobs" / job_id / "attempts" / str(epoch) / "checkpoints" / name
    folder.mkdir(parents=True)
    listed = []
    for file, content in FILES.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
        listed.append({"name": file, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    (folder / "secret.txt").write_text("not listed")
    data = {"name": name, "step": step, "kind": "published", "files": listed, "bytes": sum(map(len, FILES.values())), "ref_kl": 0.02}
    hand.ingest(job_id, event(epoch, seq, "checkpoint.saved", step, **data))
    return folder


@pytest.fixture
def saved(client: httpx.Client, hand: Hand, server: Server) -> tuple[str, Path]:
    """(path of the checkpoint, its folder)."""
    job_id = create(client)
    folder = publish(hand, server, job_id, hand.start(job_id), 1, 5)
    listed = client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"]
    return f"{JOBS}/{job_id}/checkpoints/{listed[0]['id']}", folder


def test_the_list_has_openais_shape_and_ours(client: httpx.Client, saved: tuple[str, Path]) -> None:
    shown = client.get(saved[0]).json()
    assert shown["object"] == "fine_tuning.job.checkpoint"
    assert shown["step_number"] == 5
    assert shown["metrics"]["ref_kl"] == 0.02
    assert shown["fine_tuned_model_checkpoint"] == shown["id"]
    assert {file["name"] for file in shown["files"]} == set(FILES)


def test_the_tar_holds_the_listed_files_in_one_folder(client: httpx.Client, saved: tuple[str, Path]) -> None:
    answer = client.get(f"{saved[0]}/content")
    assert answer.headers["content-type"] == "application/x-tar"
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        found = {}
        for member in archive.getmembers():
            stream = archive.extractfile(member)
            assert stream is not None
            found[member.name.partition("/")[2]] = stream.read()
    assert found == FILES


def test_head_tells_what_a_download_would_be(client: httpx.Client, saved: tuple[str, Path]) -> None:
    for query in ("", "?file=config.json"):
        head, got = client.head(f"{saved[0]}/content{query}"), client.get(f"{saved[0]}/content{query}")
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-length", "content-type", "etag", "content-disposition"):
            assert head.headers[name] == got.headers[name], name
        assert len(got.content) == int(head.headers["content-length"])


def test_one_file_whole_and_in_two_ranges(client: httpx.Client, saved: tuple[str, Path]) -> None:
    path, content = f"{saved[0]}/content?file=model.safetensors", FILES["model.safetensors"]
    whole = client.get(path)
    assert whole.content == content
    assert whole.headers["etag"] == f'"{hashlib.sha256(content).hexdigest()}"'
    head = client.get(path, headers={"range": "bytes=0-4999"})
    rest = client.get(path, headers={"range": "bytes=5000-", "if-range": head.headers["etag"]})
    assert (head.status_code, rest.status_code) == (206, 206)
    assert head.content + rest.content == content
    assert client.get(path, headers={"range": "BYTES=0-4999"}).content == head.content
    for ignored in ("items=0-1", "rows=x"):
        got = client.get(path, headers={"range": ignored})
        assert (got.status_code, got.content) == (200, content), ignored
    for wrong in ("bytes=9-1", "bytes=x", "bytes=0-1,3-4", "bytes"):
        got = client.get(path, headers={"range": wrong})
        assert (got.status_code, got.json()["error"]["param"]) == (416, "range"), wrong


UNLISTED = [
    "secret.txt",
    "manifest.json",
    "../../engine.log",
    "..%2f..%2fengine.log",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "",
]


def test_only_listed_files_are_served(client: httpx.Client, saved: tuple[str, Path]) -> None:
    for name in UNLISTED:
        assert client.get(f"{saved[0]}/content?file={name}").status_code == 404, name
    assert client.get(f"{saved[0]}/content?file=config.json%00").status_code == 422


def test_a_planted_link_is_not_followed(client: httpx.Client, saved: tuple[str, Path], tmp_path: Path) -> None:
    path, folder = saved
    outside = tmp_path / "outside"
    outside.write_bytes(FILES["config.json"])
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(outside)
    assert client.get(f"{path}/content?file=config.json").status_code == 404
    assert client.get(f"{path}/content").status_code == 404


def test_a_flipped_bit_is_409_and_enters_the_history(client: httpx.Client, hand: Hand, saved: tuple[str, Path]) -> None:
    path, folder = saved
    assert client.get(f"{path}/content").status_code == 200
    content = bytearray(FILES["model.safetensors"])
    content[100] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    for query in ("", "?file=model.safetensors"):
        answer = client.get(f"{path}/content{query}")
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "checkpoint_damaged"
        assert answer.headers["x-should-retry"] == "false"
    job_id = path.split("/")[4]
    kinds = [line["event"] for line in client.get(f"{JOBS}/{job_id}/events").json()["data"]]
    assert "checkpoint.damaged" in kinds


def test_another_jobs_address_does_not_lead_to_it(client: httpx.Client, saved: tuple[str, Path]) -> None:
    other = create(client)
    assert client.get(f"{JOBS}/{other}/checkpoints/{saved[0].rsplit('/', 1)[1]}").status_code == 404


def test_a_download_outlives_the_deletion(client: httpx.Client, saved: tuple[str, Path]) -> None:
    path, folder = saved
    with client.stream("GET", f"{path}/content") as answer:
        assert answer.status_code == 200
        with httpx.Client(base_url=client.base_url) as other:
            assert other.delete(path).json()["deleted"] is True
        assert not folder.exists()
        assert len(answer.read()) == int(answer.headers["content-length"])
    assert client.get(path).status_code == 404
    assert client.get(f"{path.rsplit('/', 1)[0]}").json()["data"] == []


def test_pages_of_checkpoints(client: httpx.Client, hand: Hand, server: Server) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    for seq in range(1, 4):
        publish(hand, server, job_id, epoch, seq, seq * 10)
    first = client.get(f"{JOBS}/{job_id}/checkpoints", params={"limit": 2}).json()
    assert [shown["step_number"] for shown in first["data"]] == [30, 20]
    assert first["has_more"] is True
    rest = client.get(f"{JOBS}/{job_id}/checkpoints", params={"after": first["last_id"]}).json()
    assert [shown["step_number"] for shown in rest["data"]] == [10]
    assert {model["id"] for model in client.get("/v1/models").json()["data"]} >= {shown["id"] for shown in first["data"]}
