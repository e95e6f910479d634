"""docs/api.md says what is so: each route with its scope, the error it quotes, and the commands it gives."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import Server
from tests.api.test_access import doors

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_route_is_documented_with_its_scope(shared_server: Server) -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    for door in (one for one in doors(shared_server.app) if one.method != "HEAD"):
        call = f"`{door.method} {door.path.replace(':path', '')}`"
        found = [row for row in rows if call in row.split("|")[1]]
        assert len(found) == 1, call
        assert found[0].split("|")[2].strip() == ("public" if door.is_public else door.scope), call


def test_nothing_is_documented_that_is_not_there(shared_server: Server) -> None:
    there = {(door.method, door.path.replace(":path", "")) for door in doors(shared_server.app) if door.method != "HEAD"}
    documented = re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/[^`]*)`", TEXT)
    assert len(documented) >= len(there)
    assert set(documented) <= there


def test_the_quoted_error_is_the_servers(shared_client: httpx.Client) -> None:
    request = re.search(r"-d '(\{\"model\".*\"bta\": 1.*\})'", TEXT)
    quoted = re.search(r"```json\n(\{.*?\n\})\n```", TEXT, re.DOTALL)
    assert request is not None
    assert quoted is not None
    answer = shared_client.post("/v1/fine_tuning/jobs", content=request.group(1), headers={"content-type": "application/json"})
    assert answer.json() == json.loads(quoted.group(1))


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands are curl's")
def test_the_first_commands_work_as_written(shared_server: Server) -> None:
    """With the model replaced: the example's needs more disk than a test should ask for."""
    block = re.search(r"# 1\..*?# 3\.", TEXT, re.DOTALL)
    assert block is not None
    upload, create = re.findall(r"^curl .*?(?=\n\n)", block.group(), re.DOTALL | re.MULTILINE)

    def run(command: str) -> dict[str, object]:
        script = f"BASE={shared_server.url}/v1\n{command}"
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    file = run(upload)
    assert file["object"] == "file"
    job = run(create.replace("file-...", str(file["id"])).replace("smollm2-135m-instruct", "tiny"))
    assert job["status"] == "queued"
