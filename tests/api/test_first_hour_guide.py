"""docs/first-hour.md says what is so: its commands parse as they stand, its job and its grader do what the text says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from grpo_engine.contract.intake import resolve_spec
from tests.api.test_client_guide import parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")


def written(name: str) -> str:
    """A file as the document writes it."""
    found = re.search(rf"^cat > {re.escape(name)} <<'END'\n(.*?)^END$", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1)


def test_every_command_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("job.json", "capitals.jsonl"):
        (tmp_path / name).write_text(written(name))
    lines = re.findall(r"(?:^|\$\()grpo ((?:'[^']*'|[^'|\n])+?)(?= \||$)", TEXT, re.MULTILINE)
    assert len(lines) == 13, lines
    for line in lines:
        parse(line)


def test_the_grader_earns_what_the_text_says(shared_client: httpx.Client) -> None:
    job = json.loads(written("job.json"))
    rows = [json.loads(line) for line in written("capitals.jsonl").splitlines()]
    spec = resolve_spec({**job, "training_file": "file-1"})
    assert (spec.method.grpo.limits.num_steps, spec.method.grpo.telemetry.rollouts_reference_every) == (12, 4)
    for sample, reward in (("The capital of France is Paris.", 0.7083), ("Hm.", 0.7)):
        body = {"grader": job["method"]["grpo"]["grader"], "item": rows[0], "model_sample": sample}
        answer = shared_client.post("/v1/fine_tuning/alpha/graders/run", json=body).json()
        assert answer["reward"] == pytest.approx(reward, abs=5e-5)
