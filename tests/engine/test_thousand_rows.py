"""Files of 1,000 rows in the shapes people have them in train as they are: GSM8K, MATH, OpenAI RFT, verl and TRL.

Column names and nesting are those of the public data sets and of verl's and TRL's documentation; the content is made here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_engine.contract.data import DataConfig
from grpo_engine.contract.grader import Grader
from grpo_engine.grader import GraderPool, Sample, check_templates, make_grader
from grpo_engine.rows import Row, read_rows
from tests.engine.grader.build import grader
from tests.engine.runs import events, make_run, make_spec, outcome, run, series
from tests.tiny import make_model

COUNT = 1000
MATH = {"type": "math"}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def gsm8k(folder: Path) -> Path:
    """`question`, `answer` with calculator marks and a last line `#### 1,234`."""
    rows = []
    for a in range(COUNT):
        total = 7 * a + 1000
        solution = f"Zoë pays 7 × {a} = <<7*{a}={7 * a}>>{7 * a} € for cafés.\nThen she adds $1,000.\n#### {total:,}"
        rows.append({"question": f"Zoë buys {a} cafés at 7 € each and one tour at 1,000 €. What does she pay — in €?", "answer": solution})
    return write_lines(folder / "train.jsonl", rows)


def hendrycks(folder: Path) -> Path:
    r"""`problem`, `level`, `type`, `solution`: the last `\boxed{}` holds nested braces, an earlier box is a step."""
    rows = []
    for a in range(COUNT):
        solution = (
            rf"We see $\boxed{{{a}}}$ first. "
            + "Expanding term by term. " * (a % 7)
            + rf"So $x=\boxed{{\dfrac{{{2 * a + 1}}}{{\sqrt{{2}}}}}}$."
        )
        rows.append(
            {"problem": rf"Find $x$ if $\sqrt{{2}}x={2 * a + 1}$.", "level": f"Level {a % 5 + 1}", "type": "Algebra", "solution": solution}
        )
    return write_lines(folder / "math.jsonl", rows)


def openai_rft(folder: Path) -> Path:
    """`messages` and columns the grader names; a developer message as OpenAI writes it."""
    rows = [
        {
            "messages": [
                {"role": "developer", "content": "Answer with the number only."},
                {"role": "user", "content": f"Wie viel ist {a} + {a}? 数字だけ"},
            ],
            "reference_answer": str(2 * a) if a % 2 else 2 * a,
            "tags": ["sum", {"level": a % 3}],
        }
        for a in range(COUNT)
    ]
    return write_lines(folder / "rft.jsonl", rows)


def verl(folder: Path) -> Path:
    """verl's data preparation: Parquet with struct and list columns."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {"role": "user", "content": f'What is {a} times 3? Let\'s think step by step and output the final answer after "####".'}
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": f"{3 * a:,}"},
            "extra_info": {"split": "train", "index": a, "answer": f"3 * {a} = {3 * a}\n#### {3 * a}", "question": f"What is {a} times 3?"},
        }
        for a in range(COUNT)
    ]
    path = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
    return path


def trl(folder: Path) -> Path:
    """TRL's conversational prompt-only format with a column for the reward function."""
    rows = [{"prompt": [{"role": "user", "content": f"Solve: {a} - 1 ="}], "solution": rf"$\boxed{{{a - 1}}}$"} for a in range(COUNT)]
    return write_lines(folder / "trl.jsonl", rows)


RFT = {"type": "string_check", "input": "{{sample.output_text}}", "reference": "{{item.reference_answer}}", "operation": "eq"}
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "gsm8k": (gsm8k, MATH, "After thought\n#### 1,063"),
    "math": (hendrycks, MATH, r"Thus \boxed{\frac{19}{\sqrt2}}"),
    "messages": (openai_rft, RFT, "18"),
    "verl": (verl, MATH, "3 x 9 is 27, so\n#### 27"),
    "prompt": (trl, {**MATH, "reference": "{{item.solution}}"}, r"It is \boxed{8}."),
}
"""The right answer to row 10 (a = 9) of each."""


@pytest.mark.parametrize("kind", CASES)
def test_every_row_is_read_and_graded_without_a_change_to_the_file(tmp_path: Path, kind: str) -> None:
    write, raw, right = CASES[kind]
    report = read_rows(write(tmp_path), DataConfig())
    assert (len(report.rows), report.num_bad, report.num_duplicates, report.formats) == (COUNT, 0, 0, {kind: COUNT})
    cfg: Grader = grader(raw)
    check_templates(cfg, report.rows)
    with make_grader(cfg, processes=1) as ready:
        assert _verdicts(ready, report.rows, right) == [1.0, 0.0]


def _verdicts(ready: GraderPool, rows: list[Row], text: str) -> list[float]:
    """Of the right text for row 10, and of the same text for row 11."""
    return [score.value for score in ready.score([Sample(rows[index].item, text) for index in (9, 10)])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_file_of_a_thousand_rows_trains_as_it_is(tmp_path: Path, kind: str) -> None:
    write, raw, _ = CASES[kind]
    make_model(tmp_path / "model", "TINY")
    spec = make_spec(tmp_path, grader=raw, limits={"num_steps": 2}, sampling={"group_size": 2, "prompts_per_step": 2})
    run_dir = make_run(tmp_path, spec=spec, training_file=str(write(tmp_path)))
    run(run_dir)
    assert outcome(run_dir).status == "succeeded", outcome(run_dir)
    (loaded,) = events(run_dir, "data.loaded")
    assert (loaded.data["num_prompts"], loaded.data["num_skipped_long"]) == (COUNT, 0)
    assert [step["grader/failed_frac"] for step in series(run_dir).values()] == [0, 0]
