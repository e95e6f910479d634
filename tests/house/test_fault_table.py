"""Every row of the fault table names tests that exist; a row without a full test says why, and which comes nearest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROWS: list[dict[str, Any]] = json.loads((TESTS / "faults" / "table.json").read_text(encoding="utf-8"))


def test_the_table_has_68_rows() -> None:
    assert [row["number"] for row in ROWS] == list(range(1, 69))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["number"]))
def test_each_row_has_tests_that_exist(row: dict[str, Any]) -> None:
    assert row["fault"]
    assert row["promise"]
    assert row["tests"], "a row needs a test, the nearest one where the fault itself cannot be made"
    for node in row["tests"]:
        file, _, name = node.partition("::")
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"def {name}\(", text), f"{node} does not exist"
    assert row.get("reason", "A sentence.").endswith(".")


def test_every_fault_test_belongs_to_a_row() -> None:
    named = {node for row in ROWS for node in row["tests"]}
    found = {
        f"faults/{path.name}::{name}"
        for path in (TESTS / "faults").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found - named == set()
