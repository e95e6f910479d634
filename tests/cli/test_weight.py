"""The command stays light: what only the operator's commands need is imported when one of them runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = ("sqlalchemy", "alembic", "celery", "redis", "fastapi", "torch")


def test_the_command_line_imports_neither_database_nor_queue_nor_web() -> None:
    code = f"import sys, api.cli; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
