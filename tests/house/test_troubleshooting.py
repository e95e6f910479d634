"""docs/troubleshooting.md names what there is: every detector, every error of a request, and settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.cli import app
from grpo_engine.contract import error
from grpo_engine.contract.diagnostics import DETECTOR_NAMES
from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import GrpoConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SETTINGS = sorted(set(re.findall(r"`((?:sampling|loss|kl|beta|resources|data|checkpoints)\.[a-z_.]+)", TEXT)))
WHOLE = validate(GrpoConfig, {"grader": {"type": "math"}, "beta": {"rule": "deadband", "value": 0.02, "target": 0.02}})


def test_every_detector_has_its_line() -> None:
    assert [name for name in DETECTOR_NAMES if f"`{name}`" not in TEXT] == []


def test_every_refusal_has_its_line() -> None:
    kinds = [kind for kind in vars(error).values() if isinstance(kind, type) and issubclass(kind, error.GrpoError)]
    codes = {kind.code for kind in kinds} - {error.GrpoError.code, "reference_not_loaded"}
    assert len(codes) >= 14
    assert sorted(code for code in codes if f"`{code}`" not in TEXT) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_named_exists(setting: str) -> None:
    section, *rest = setting.split(".")
    here = getattr(WHOLE, section)
    for name in rest:
        assert hasattr(here, name), setting
        here = getattr(here, name)


def test_commands_named_exist() -> None:
    known = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands if command.callback}
    known |= {group.name for group in app.registered_groups}
    assert set(re.findall(r"`grpo ([a-z-]+)", TEXT)) <= known
