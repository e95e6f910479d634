"""`grpo demo --exit` on the tiny model: what a person sees, and an exit code that tells the truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.cli.terminal import grpo
from tests.stack import job_spec
from tests.tiny import make_model


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_model(tmp_path / "models" / "tiny")
    spec = job_spec(
        "file-later",
        num_steps=3,
        beta={"rule": "deadband", "value": 0.04, "min": 0.04, "target": 1e-6, "update_every": 1, "ema_decay": None},
    )
    del spec["training_file"]
    (tmp_path / "job.json").write_text(json.dumps(spec))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(16)))
    return tmp_path


def run(place: Path) -> tuple[int, str]:
    words = ("demo", "--exit", "--port", "0", "--spec", "job.json", "--rows", "rows.jsonl")
    answer = grpo(*words, cwd=place, GRPO_MODEL_DIR=str(place / "models"), GRPO_MIN_FREE_BYTES="1000000")
    return answer.returncode, answer.stdout


def test_the_demo_shows_each_step_and_where_the_results_are(place: Path) -> None:
    code, shown = run(place)
    assert code == 0, shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    assert "raised" in shown
    where = next(line.split(maxsplit=1)[1] for line in shown.splitlines() if line.startswith("checkpoint  "))
    AutoModelForCausalLM.from_pretrained(where)
    assert shown.rstrip().endswith("stopped")


@pytest.mark.slow
def test_a_demo_whose_job_is_refused_says_why_and_exits_with_1(place: Path) -> None:
    spec = json.loads((place / "job.json").read_text())
    (place / "job.json").write_text(json.dumps({**spec, "model": "unknown"}))
    code, shown = run(place)
    assert code == 1
    assert "model 'unknown' is not known" in shown
    assert shown.rstrip().endswith("stopped")
