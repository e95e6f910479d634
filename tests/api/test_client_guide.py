"""docs/client.md and the GitHub workflow say what is so: their commands parse as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from api.cli import app

ROOT = Path(__file__).parents[2]


def parse(line: str) -> None:
    """Raises what the command line raises for a word it does not know."""
    words, command = shlex.split(line), get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context("grpo", words)


def test_every_command_of_the_guide_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("job.json", "rows.jsonl", "rules.json", "grader.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    lines = [line for line in re.findall(r"`grpo ([^`]+)`", text) if not line.startswith("--")]
    assert len(lines) >= 25
    for line in lines:
        parse(line)


def test_every_command_of_the_github_workflow_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training").mkdir()
    for name in ("job.json", "rows.jsonl"):
        (tmp_path / "training" / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    workflow = yaml.safe_load((ROOT / "examples" / "github-actions.yml").read_text(encoding="utf-8"))
    scripts = [step["run"].replace("\\\n", " ") for step in workflow["jobs"]["train"]["steps"] if "run" in step]
    lines = [line.partition(" > ")[0].strip() for script in scripts for line in script.splitlines() if line.strip().startswith("grpo ")]
    assert len(lines) == 6
    for line in lines:
        parse(re.sub(r'"\$\(.*?\)"', "ftckpt-1", line).removeprefix("grpo "))
