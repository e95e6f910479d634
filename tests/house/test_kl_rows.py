"""Every claim and every public issue of tests/golden/kl_rows.json has a test named by its row, or a stated reason why not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROWS = json.loads((TESTS / "golden" / "kl_rows.json").read_text(encoding="utf-8"))
IDS = [row["id"] for kind in ("claims", "issues") for row in ROWS[kind]]

PENDING = {
    "claim_26": "an ablation that is in no source: there is nothing to reproduce, and the handbook says so",
    "claim_35": "an opinion",
    "claim_37": "numbers without a source: never repeated as fact",
    "claim_39": "a wrong title in a reading list",
    "issue_miles_3222": "a remark about the field, not about a behaviour",
    "issue_unsloth_2688": "needs a model: the reference is loaded by the engine's own tests",
}


def row_test_names() -> set[str]:
    """Every test function in the tree."""
    found = (re.findall(r"def (test_(?:claim|issue)_\w+)\(", path.read_text(encoding="utf-8")) for path in TESTS.rglob("test_*.py"))
    return {name for names in found for name in names}


NAMES = row_test_names()


def named_after(row: str) -> list[str]:
    return sorted(name for name in NAMES if name == f"test_{row}" or name.startswith(f"test_{row}_"))


@pytest.mark.parametrize("row", IDS)
def test_each_row_has_a_test_or_a_reason(row: str) -> None:
    assert bool(named_after(row)) != (row in PENDING), "a row needs a test, or a reason and no test"


def test_no_test_and_no_reason_is_about_an_unknown_row() -> None:
    assert len(set(IDS)) == len(IDS)
    assert set(PENDING) <= set(IDS)
    assert {name for row in IDS for name in named_after(row)} == NAMES


def test_all_claims_of_the_text_are_listed() -> None:
    assert [row["id"] for row in ROWS["claims"]] == [f"claim_{number:02d}" for number in range(1, 40)]


def test_each_issue_has_a_public_source_and_a_requirement() -> None:
    for row in ROWS["issues"]:
        assert row["requirement"]
        assert row["sources"]
        assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/issues/\d+", url) for url in row["sources"])
