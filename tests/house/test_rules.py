"""The rules of the house, checked on what is committed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("api", "jobs", "worker", "grpo_engine")
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "migrations" not in path.parts)
LONGEST_MODULE = 320


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "module", ["api.app", "worker.tasks", "jobs.dispatcher", "grpo_engine.contract.job", "grpo_engine.grader", "grpo_engine.rows"]
)
def test_light_rooms_never_load_torch(module: str) -> None:
    code = f"import {module}, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["worker.tasks", "grpo_engine.contract.job"])
def test_the_foreman_and_the_contract_need_neither_web_nor_database(module: str) -> None:
    code = f"import {module}, sys; print([name for name in ('fastapi', 'sqlalchemy') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_modules_stay_readable() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_there_are_no_junk_drawers() -> None:
    assert [relative(path) for path in MODULES if path.stem in ("utils", "common", "helpers", "misc")] == []


def test_only_settings_read_the_environment() -> None:
    reads = re.compile(r"os\.(environ|getenv)\b")
    readers = [relative(path) for path in MODULES if reads.search(path.read_text())]
    assert [name for name in readers if name != "jobs/settings.py"] == []


def test_nothing_is_left_unfinished() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError")
    assert [relative(path) for path in MODULES if marks.search(path.read_text())] == []


def test_public_modules_say_what_they_are() -> None:
    silent = [relative(path) for path in MODULES if path.read_text().strip() and not path.read_text().lstrip().startswith(('"""', 'r"""'))]
    assert silent == []
