"""An operator's plug-ins, installed for the tests as a distribution of their own that grader processes find by entry point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_engine.grader import ProcessPool

PLUGINS = '''
import os, signal, sys, time


def length(config):
    return lambda item, output_text: config.get("factor", 1) * len(output_text)


def say(config):
    """Returns what the row asks for."""
    answers = {
        "none": None, "text": "1.0", "true": True, "nan": float("nan"), "inf": float("-inf"), "huge": 1e300, "list": [1.0],
        "two": [1.0, 2.0], "int": 1, "half": 0.5, "edge": 1e6, "over": 1000001,
    }
    return lambda item, output_text: answers[item["say"]]


def misbehave(config):
    """Does what the completion says."""
    def grade(item, output_text):
        match output_text:
            case "raise":
                raise ValueError("the plug-in is unhappy")
            case "hang":
                while True:
                    time.sleep(3600)
            case "spin":
                while True:
                    pass
            case "hold":
                return len(str(7 ** (7 ** 12)))  # one C call that never lets another thread run
            case "exit":
                os._exit(3)
            case "system_exit":
                sys.exit(4)
            case "print":
                print("this is no answer", flush=True)
            case "deep":
                return grade(item, output_text)
            case "memory":
                return len(bytearray(64 * 2**30))
        return 1.0
    return grade


def broken(config):
    raise RuntimeError("no licence")


def lazy(config):
    return 7
'''
ENTRY_POINTS = "[grpo.graders]\n" + "".join(
    f"{name} = grader_plugins:{name}\n" for name in ("length", "say", "misbehave", "broken", "lazy")
)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path of this process and of the grader processes."""
    (tmp_path / "grader_plugins.py").write_text(PLUGINS)
    info = tmp_path / "grader_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: grader-plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPool]:
    """Grader processes shared by a module's tests."""
    pool = ProcessPool(2)
    yield pool
    pool.close()
