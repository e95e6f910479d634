"""schemathesis sends what the OpenAPI document allows, and some that it does not: no 5xx, and no answer of an undocumented shape."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from jobs.live import Live
from tests.api.conftest import Server, create

CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"


def test_the_server_keeps_to_its_own_description(shared_server: Server, tmp_path: Path) -> None:
    live = Live.connect(shared_server.settings)
    live.worker_heartbeat("worker-1", {"host": "here", "queues": ["grpo-cpu"]})
    live.dispatcher_heartbeat({"pid": 1})
    live.close()
    with shared_server.client() as client:
        create(client)
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert command is not None
    arguments = ["run", f"{shared_server.url}/openapi.json", "--url", shared_server.url, "--checks", CHECKS]
    options = ["--exclude-path-regex", "/stream$", "--phases", "fuzzing", "--max-examples", "4", "--seed", "7", "--no-color"]
    done = subprocess.run([command, *arguments, *options], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Tested: " in done.stdout
