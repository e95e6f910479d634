"""`grpo keys` and `grpo admin`: wrong arguments end with words and an exit code, never with a traceback or a key nobody can list."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from api import admin, keys


@pytest.mark.parametrize(
    "arguments", [["a", "--expires-in-days", "inf"], ["a", "--expires-in-days", "nan"], ["a", "--expires-in-days", "1e300"], [" "]]
)
def test_a_key_with_an_odd_expiry_or_no_name_is_not_made(tmp_path: Path, arguments: list[str]) -> None:
    answer = CliRunner().invoke(keys.app, ["create", *arguments, "--data-dir", str(tmp_path)])
    assert answer.exit_code == 2
    assert "grpo_" not in answer.output
    assert CliRunner().invoke(keys.app, ["list", "--data-dir", str(tmp_path)]).exit_code == 0


def test_an_unknown_scope_and_an_unknown_key_are_named(tmp_path: Path) -> None:
    scope = CliRunner().invoke(keys.app, ["create", "a", "--scope", "all", "--data-dir", str(tmp_path)])
    assert (scope.exit_code, "read, submit, control, admin" in scope.output) == (1, True)
    unknown = CliRunner().invoke(keys.app, ["revoke", "nope", "--data-dir", str(tmp_path)])
    assert (unknown.exit_code, "nope" in unknown.output) == (1, True)


def test_brackets_in_a_name_are_listed_as_they_are(tmp_path: Path) -> None:
    runner = CliRunner(env={"COLUMNS": "200"})
    assert runner.invoke(keys.app, ["create", "[b]ci[/x]", "--data-dir", str(tmp_path)]).exit_code == 0
    assert "[b]ci[/x]" in runner.invoke(keys.app, ["list", "--data-dir", str(tmp_path)]).output


def test_a_backup_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    answer = CliRunner().invoke(admin.app, ["backup", str(tmp_path / "none" / "copy.db"), "--data-dir", str(tmp_path)])
    assert (answer.exit_code, "unable to open" in answer.output) == (1, True)
    assert isinstance(answer.exception, SystemExit)
