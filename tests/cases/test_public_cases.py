"""All public cases as one parametrised test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_engine.grader import ProcessPool
from tests.cases import grading, reading, training  # noqa: F401 - they register their runners
from tests.cases.elsewhere import ELSEWHERE
from tests.cases.registry import CASES, RUNNERS, Bench

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPool]:
    """Grader processes shared by all cases."""
    pool = ProcessPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_case(case_id: str, tmp_path: Path, processes: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    if case_id in RUNNERS:
        RUNNERS[case_id](CASES[case_id], Bench(tmp_path, processes, monkeypatch))
        return
    for node in ELSEWHERE[case_id]:
        path, _, name = node.partition("::")
        assert name in functions_of(TESTS / path), f"{case_id} is said to be checked by {node}, which is not there"


def test_each_case_has_one_place() -> None:
    assert set(RUNNERS).isdisjoint(ELSEWHERE)
    assert set(RUNNERS) | set(ELSEWHERE) == set(CASES)


def functions_of(path: Path) -> set[str]:
    """Names of the test functions in a file."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
