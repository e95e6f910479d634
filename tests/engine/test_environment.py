"""Environments: rows and grader in one, the same for a seed, held-out rows apart, and no completion ever run as code."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.contract.environment import Environment
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.contract.job import JobSpec
from grpo_engine.environment import held_out, make_environment_grader, training, write_rows
from grpo_engine.environment.guard import Refused, guarded, plain_eval
from grpo_engine.grader import GraderPool
from tests.engine.runs import events, make_job, make_run, make_spec, outcome, run, series

TASK = {"type": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}, "size": 12}


def raw(**changes: Any) -> dict[str, Any]:
    """A job on an environment; keyword arguments go beside `method`, `grpo` into it."""
    grpo = {"environment": TASK, **changes.pop("grpo", {})}
    return {"model": "smollm2-135m-instruct", "method": {"type": "grpo", "grpo": grpo}, **changes}


def spec(**changes: Any) -> JobSpec:
    return resolve_spec(raw(**changes))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("environment") / "rows.jsonl"
    write_rows(Environment(**{**TASK, "seed": 3}), path)
    return read(path)


@pytest.fixture(scope="module")
def scorer() -> Iterator[GraderPool]:
    with make_environment_grader(Environment(**{**TASK, "seed": 3}), processes=1) as ready:
        yield ready


@pytest.mark.slow
def test_rows_carry_question_answer_and_a_chat_prompt(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 12
    for row in rows:
        assert row["messages"] == [{"role": "user", "content": row["question"]}]
        assert eval(row["metadata"]["expression"]) == int(row["answer"])


@pytest.mark.slow
def test_the_tasks_own_scorer_grades_the_tag_or_the_rest(rows: list[dict[str, Any]], scorer: GraderPool) -> None:
    row, gold = rows[0], rows[0]["answer"]
    texts = [f"<think>no</think>so <answer> {gold} </answer>", f"<think>{gold}</think>  {gold}\n", f"<think>{gold}", "", f"{gold}1"]
    scores = scorer.score([(row, text, {}) for text in texts])
    assert [score.error for score in scores] == [None] * 5
    assert [score.value == 1.0 for score in scores] == [True, True, False, False, False]


@pytest.mark.slow
def test_a_row_without_answer_is_a_fault_and_no_score(rows: list[dict[str, Any]], scorer: GraderPool) -> None:
    (score,) = scorer.score([({"question": rows[0]["question"]}, "5", {})])
    assert score.value != score.value
    assert "chain_sum" in (score.error or "")


@pytest.mark.slow
def test_a_run_trains_on_an_environment_with_held_out_rows(tmp_path: Path) -> None:
    root = make_job(tmp_path)
    body = make_spec(root, evaluation={"every": 2, "max_prompts": 3}, limits={"num_steps": 2})
    del body["method"]["grpo"]["grader"]
    body["method"]["grpo"]["environment"] = TASK
    run_dir = make_run(root, spec=body, training_file=None)
    run(run_dir)
    assert outcome(run_dir).status == "succeeded", outcome(run_dir)
    (loaded,) = events(run_dir, "data.loaded")
    assert (loaded.data["num_prompts"], loaded.data["validation"]["num_evaluated"]) == (12, 3)
    assert len(events(run_dir, "evaluation.completed")) == 2
    assert all(step["grader/failed_frac"] == 0 for step in series(run_dir).values())
    assert [len(read(run_dir / f"{name}.jsonl")) for name in ("training_file", "validation_file")] == [12, 3]


def test_held_out_rows_come_from_other_seeds() -> None:
    job = spec(seed=7, grpo={"evaluation": {"every": 5, "max_prompts": 4}})
    apart = held_out(job)
    assert apart is not None
    assert (training(job).seed, apart.seed, apart.size) == (7, 19, 4)
    assert training(spec(grpo={"environment": {**TASK, "seed": 3}})).seed == 3
    assert held_out(spec()) is None


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"name": "chain_sums"}, "name", "did you mean chain_sum"),
        ({"name": "codeio"}, "name", "executes the programs"),
        ({"config": {"max_term": 2}}, "config.max_term", "did you mean max_terms"),
        ({"config": {"max_terms": "2"}}, "config.max_terms", "type int"),
        ({"config": {"min_terms": 9, "max_terms": 2}}, "config", "max_terms must be >= min_terms"),
        ({"name": "arc_agi"}, "name", "cannot be kept as JSON"),
    ],
)
@pytest.mark.slow
def test_what_the_package_does_not_take_is_refused_by_its_field(tmp_path: Path, changes: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        write_rows(Environment(**{**TASK, "config": {}, "seed": 1, "size": 3, **changes}), tmp_path / "rows.jsonl")
    assert caught.value.param == f"method.grpo.environment.{param}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_sum", "knight_swap"])
def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path, name: str) -> None:
    """knight_swap depends on the order of sets, which Python draws anew in each process."""
    for copy in ("a", "b"):
        write_rows(Environment(type="reasoning_gym", name=name, seed=5, size=2), tmp_path / copy)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.slow
def test_rows_that_take_too_long_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"within 0\.1 s") as caught:
        write_rows(Environment(type="reasoning_gym", name="zebra_puzzles", seed=5, size=5000), tmp_path / "rows", limit_s=0.1)
    assert caught.value.param == "method.grpo.environment.size"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["n_queens", "spiral_matrix", "binary_matrix", "string_insertion", "countdown", "simple_integration"])
def test_scorers_that_evaluate_answers_run_nothing_of_a_completion(tmp_path: Path, name: str) -> None:
    """These scorers call eval on the answer, or SymPy's parser, which does."""
    environment = Environment(type="reasoning_gym", name=name, seed=5, size=2)
    write_rows(environment, tmp_path / "rows")
    mark = tmp_path / "owned"
    attacks = [
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"[open({str(mark)!r}, 'w') for x in (1,)]",
        f"Symbol('x').func.__globals__['__builtins__']['open']({str(mark)!r}, 'w')",
        f"S(\"__import__('pathlib').Path({str(mark)!r}).touch()\")",
        "(" * 2000 + "1" + ")" * 2000,
        "9**9**9**9",
    ]
    row = read(tmp_path / "rows")[0]
    with make_environment_grader(environment, processes=1) as ready:
        right, *scores = ready.score([(row, text, {}) for text in [row["answer"], *attacks]])
    assert right.value == 1.0, right
    assert not mark.exists()
    assert all(score.value < 0.3 for score in scores), scores


@pytest.mark.slow
def test_not_a_number_is_no_answer(tmp_path: Path) -> None:
    """complex_arithmetic scores by distance, and any distance from NaN passes for none."""
    environment = Environment(type="reasoning_gym", name="complex_arithmetic", seed=5, size=1)
    write_rows(environment, tmp_path / "rows")
    (row,) = read(tmp_path / "rows")
    with make_environment_grader(environment, processes=1) as ready:
        assert [score.value for score in ready.score([(row, text, {}) for text in (row["answer"], "nan", "inf+nanj")])] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "text", ["open('x')", "(1).real", "[x for x in (1,)]", "lambda: 1", "__import__", "f'{1}'", "sqrt(2)", "int('1')", "1 if 1 else 2", 7]
)
def test_only_plain_values_are_evaluated(text: Any) -> None:
    with pytest.raises((Refused, SyntaxError)):
        plain_eval(text, {"open": open, "int": int})


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "(9**999)**999",
        "2**-9**99",
        "2**(1e9)",
        "1 << 10**9",
        "*".join(["9**999"] * 20),
        "1e400**2",
        "-" * 9000 + "1",
        "[0]*10**9",
        "([1]+[2])*10**8",
        "'a'*10**9",
        "'%999999999d' % 1",
    ],
)
def test_what_could_be_huge_is_not_computed(text: str) -> None:
    """A completion of a few tokens must not cost the grader its process."""
    with pytest.raises((Refused, SyntaxError)):
        plain_eval(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2**10", 1024),
        ("49*(85 - 1)/14 - 42 - 73", 179),
        ("9**0.5", 3.0),
        ("(1+2j)*3", 3 + 6j),
        ("4**-1", 0.25),
        ("[[1, -2], ['a']]", [[1, -2], ["a"]]),
    ],
)
def test_ordinary_arithmetic_is_computed(text: str, value: Any) -> None:
    assert plain_eval(text) == value


def test_scorers_evaluate_plain_values_only_and_others_as_ever() -> None:
    scorer: dict[str, Any] = {"__name__": "reasoning_gym.made_up"}
    exec("def score(text):\n    return eval(text)\ndef run(text):\n    exec(text)\n", scorer)
    before = (eval, exec)
    with guarded():
        assert scorer["score"]("[[1, 0], ['a', 'b']]") == [[1, 0], ["a", "b"]]
        assert scorer["score"]("2 * (3 + 4)") == 14
        for attack in ("__import__('os')", "open('x')", "().__class__"):
            with pytest.raises(Refused):
                scorer["score"](attack)
        with pytest.raises(Refused):
            scorer["run"]("x = 1")
        here = 5
        assert eval("len([here])") == 1
        assert collections.namedtuple("Pair", "a b")(1, here).b == 5
    assert (eval, exec) == before


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"training_file": "file-1"}, "training_file", "leave out this file"),
        ({"validation_file": "file-1"}, "validation_file", "leave out this file"),
        ({"grpo": {"grader": {"type": "math"}}}, "method.grpo.grader", "leave out grader"),
        ({"grpo": {"data": {"format": "gsm8k"}}}, "method.grpo.data.format", "leave it out"),
        ({"grpo": {"data": {"prompt_field": "q"}}}, "method.grpo.data.prompt_field", "leave it out"),
        ({"grpo": {"environment": {**TASK, "config": {"seed": 1}}}}, "method.grpo.environment.config.seed", "move it"),
        ({"grpo": {"environment": {**TASK, "type": "gym"}}}, "method.grpo.environment.type", "reasoning_gym"),
        ({"grpo": {"environment": {**TASK, "size": 0}}}, "method.grpo.environment.size", "1"),
        ({"grpo": {"environment": None}}, "method.grpo.grader", "give a grader"),
    ],
)
def test_what_an_environment_excludes_is_said(changes: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        spec(**changes)
    assert caught.value.param == param
