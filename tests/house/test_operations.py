"""docs/operations.md knows every event, verdict, gauge and readiness check that the code can emit, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from grpo_engine import outcome
from grpo_engine.contract.event import ENGINE_EVENTS
from jobs.lifecycle import State
from jobs.notices import Notice

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def written_by(folder: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py")))


def history_events() -> set[str]:
    """What the bookkeeper writes into a history: literals handed to `_note`, and the states of `job.<state>`."""
    ledger = written_by("jobs/ledger")
    calls = re.findall(r'_note\(\s*connection,\s*[\w.]+,\s*f?"([a-z_.{}]+)"', ledger)
    found = set(calls) | set(re.findall(r'kind="(job\.[a-z_]+)"', written_by("jobs/dispatcher")))
    found |= {f"job.{state}" for state in State} if "job.{to}" in found else set()
    found |= {f"checkpoint.{word}" for word in ("pinned", "unpinned")} if "checkpoint.{word}" in found else set()
    return {name for name in found if "{" not in name} | set(get_args(Notice.model_fields["type"].annotation))


def named_on_the_page() -> set[str]:
    return set(re.findall(r"`([a-z_]+\.[a-z_]+)`", PAGE))


def test_the_search_for_events_finds_what_is_known_to_be_there() -> None:
    assert {"job.failed", "job.stalled", "job.created", "telemetry.gap", "checkpoint.damaged", "checkpoint.pinned"} <= history_events()
    assert {"attempt.duplicate_delivery", "control.requested", "job.cancel_requested"} <= history_events()


def test_every_event_is_on_the_page() -> None:
    assert (set(ENGINE_EVENTS) | history_events()) - named_on_the_page() == set()


def test_every_event_on_the_page_exists() -> None:
    known = set(ENGINE_EVENTS) | history_events()
    families = {name.partition(".")[0] for name in known}
    assert {name for name in named_on_the_page() if name.partition(".")[0] in families} - known - {"job.json", "checkpoints.keep"} == set()


def test_every_verdict_that_fails_or_repeats_a_job_is_on_the_page() -> None:
    reasons = {value.reason for value in vars(outcome).values() if isinstance(value, type) and issubclass(value, outcome.RunFailure)}
    reasons |= set(re.findall(r'_fail(?:ed)?\(\s*(?:connection, job, )?"([a-z_]+)"', written_by("jobs/ledger") + written_by("worker")))
    assert {"poison", "crash", "out_of_memory", "worker_lost", "nonfinite", "grader"} <= reasons
    rows = [line for line in PAGE.splitlines() if line.startswith("| `job.")]
    assert {reason for reason in reasons if not any(f"`{reason}`" in row.split("|")[1] for row in rows)} == set()


def test_every_gauge_and_readiness_check_is_on_the_page() -> None:
    health = (ROOT / "api" / "routes" / "health.py").read_text(encoding="utf-8")
    gauges = set(re.findall(r'"(grpo_[a-z_]+)"', health))
    assert len(gauges) >= 8
    assert {name for name in gauges if name not in PAGE} == set()
    checks = set(re.findall(r'"([a-z]+)": _[a-z]+\(services\)', health))
    assert {"database", "redis", "dispatcher"} <= checks
    assert {name for name in checks if f"| `{name}` |" not in PAGE} == set()
