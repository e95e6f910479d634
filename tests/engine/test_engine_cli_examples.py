"""The example that the demo submits: its spec resolves, its rows read, and its graders score as the documents say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_engine.contract.beta import DeadbandBeta
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.grader import make_grader
from grpo_engine.rows import read_rows

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_arithmetic_spec_resolves_with_its_rule() -> None:
    spec = resolve_spec({**json.loads((EXAMPLES / "arithmetic.json").read_text()), "training_file": "file-1"})
    beta = spec.method.grpo.beta
    assert isinstance(beta, DeadbandBeta)
    assert (beta.value, beta.min, beta.up, beta.update_every, beta.ema_decay, beta.target) == (0.04, 0.04, 1.5, 1, None, 0.1)
    assert spec.method.grpo.optimizer.learning_rate == 1e-5


def test_the_arithmetic_rows_are_right() -> None:
    spec = resolve_spec({**json.loads((EXAMPLES / "arithmetic.json").read_text()), "training_file": "file-1"})
    report = read_rows(EXAMPLES / "arithmetic.jsonl", spec.method.grpo.data)
    assert len(report.rows) == 400
    assert report.num_duplicates == 0
    for row in report.rows:
        assert row.messages is not None
        a, b = row.messages[-1]["content"].removeprefix("What is ").split("?")[0].split(" + ")
        assert row.item["reference_answer"] == str(int(a) + int(b))


@pytest.mark.parametrize(
    ("text", "reward"), [("19", 1.0), ("20", 0.3), (" 20 ", 0.3), ("The answer is 19.", 0.0), ("12 + 7 = 19", 0.0), ("", 0.0)]
)
def test_the_exact_number_is_worth_one_and_any_bare_number_three_tenths(text: str, reward: float) -> None:
    spec = resolve_spec({**json.loads((EXAMPLES / "arithmetic.json").read_text()), "training_file": "file-1"})
    assert spec.method.grpo.grader is not None
    with make_grader(spec.method.grpo.grader) as grader:
        (score,) = grader.score([({"reference_answer": "19"}, text, {})])
    assert score.error is None
    assert score.value == pytest.approx(reward)
