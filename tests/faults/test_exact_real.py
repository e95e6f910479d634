"""Engine processes with features on, killed with SIGKILL at random moments and resumed: bit for bit the run left alone.

tests/engine/test_exact_resume.py cuts each feature at chosen moments without killing; here the kills are real and nobody
chooses the moment. All victims run at once, so that a case costs little more than the start of a process.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_engine.__main__ import run
from tests.engine.cuts import acts, final_weights, first_attempt, go_on, story
from tests.engine.runs import events, make_job, make_spec, outcome, start, text_of

pytestmark = pytest.mark.faults

EVALUATED: dict[str, Any] = {"evaluation": {"every": 2, "max_prompts": 3}}
CASES: dict[str, dict[str, Any]] = {
    "calibrated beta, two updates a rollout, dynamic sampling, schedules, held-out file": {
        "beta": {
            "rule": "ppo",
            "value": 0.04,
            "calibration": {"rollouts": 4, "discard": 1, "stat": "mean", "min": 1e-6, "max": 1.0},
            "ema_decay": 0.5,
            "update_every": 2,
        },
        "loss": {"num_iterations": 2, "dynamic_sampling": True},
        "optimizer": {"weight_decay": 0.1, "lr_schedule": "cosine", "warmup_steps": 3},
        "limits": {"num_steps": 9},
        "checkpoints": {"resume_every": 1, "every": 4},
        **EVALUATED,
    },
    "LoRA under a schedule of beta": {
        "beta": {"rule": "schedule", "schedule": {"type": "cosine", "start": 0.1, "end": 0.01}},
        "adapter": {"type": "lora", "rank": 4},
        "optimizer": {"learning_rate": 0.01},
        "limits": {"num_steps": 8},
        "checkpoints": {"resume_every": 2},
    },
    "rollbacks, a reference that moves, held-out file": {
        "beta": 0.05,
        "reference": {"sync_every": 2, "mixup_alpha": 0.5},
        "guardrails": [
            {
                "detector": "kl_out_of_control",
                "action": {"type": "rollback", "beta_factor": 2.0, "learning_rate_factor": 0.5, "reseed": True, "max_count": 2},
            }
        ],
        "diagnostics": {"kl_out_of_control": {"kl": 1e-9, "updates": 2, "clear_after": 1}},
        "limits": {"num_steps": 6},
        "checkpoints": {"resume_every": 1, "every": 1},
        **EVALUATED,
    },
    "two ranks": {
        "beta": {"rule": "deadband", "value": 0.04, "target": 0.02, "min": 0.01, "update_every": 2, "ema_decay": 0.5},
        "resources": {"cpu_ranks": 2},
        "limits": {"num_steps": 8},
        "checkpoints": {"resume_every": 1},
    },
}
STEPS_BEFORE_KILL = (1, 3)
PATIENCE_S = 400
"""Of a loaded machine; four victims share it with the runs left alone."""


def test_killed_at_random_moments_every_feature_goes_on_exactly(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    sys.stdout.write(f"moments of the kills: seed {seed}\n")
    dice = random.Random(seed)
    job = make_job(tmp_path)
    validation = {"validation_file": str(job / "rows.jsonl")}
    specs = {name: make_spec(job, **grpo) for name, grpo in CASES.items()}
    files = {name: validation if "evaluation" in grpo else {} for name, grpo in CASES.items()}
    victims = {name: first_attempt(job, f"{number}-killed", specs[name], **files[name]) for number, name in enumerate(CASES)}
    wholes = {name: first_attempt(job, f"{number}-whole", specs[name], **files[name]) for number, name in enumerate(CASES)}
    moments = {name: (dice.randint(*STEPS_BEFORE_KILL), dice.uniform(0.0, 0.05)) for name in CASES}
    with ThreadPoolExecutor(len(CASES)) as pool:
        kills = [pool.submit(kill, victims[name], *moments[name]) for name in CASES]
        for name in CASES:
            carry_out(wholes[name], specs[name])
        for one in kills:
            one.result(timeout=PATIENCE_S)
    for name in CASES:
        resumed = go_on(job, specs[name], [victims[name]], **files[name])
        carry_out(resumed, specs[name])
        same(wholes[name], [victims[name], resumed], name)


def carry_out(run_dir: Path, spec: dict[str, Any]) -> None:
    """An attempt to its end: here, or, where it wants several, in processes of its own."""
    if spec["method"]["grpo"]["resources"].get("cpu_ranks", 1) == 1:
        run(run_dir)
        return
    process = start(run_dir)
    process.wait(timeout=PATIENCE_S)


def same(whole: Path, pieces: list[Path], name: str) -> None:
    """Metrics, KL, beta, rewards, completions, acts of guardrails, verdict, and the weights of every published file."""
    last = pieces[-1]
    assert (outcome(last).status, outcome(last).reason) == (outcome(whole).status, outcome(whole).reason), (
        f"{name}: {outcome(last).message}"
    )
    expected, found = story([whole]), story(pieces)
    assert list(found) == list(expected), name
    for step, row in expected.items():
        assert found[step] == row, f"{name}: step {step}"
    assert acts(pieces) == acts([whole]), name
    assert bool(acts(pieces)) == ("rollbacks" in name), "the guardrail acted where it should"
    if outcome(whole).status == "succeeded":
        assert final_weights(last) == final_weights(whole), name
    else:
        assert "rollbacks" in name
    first = events(last)[0]
    assert first.type == "run.rewound", name


def kill(run_dir: Path, num_steps: int, rest_s: float) -> None:
    """SIGKILL the attempt's processes, a moment after so many completed steps."""
    process = start(run_dir)
    deadline = time.monotonic() + PATIENCE_S
    family: list[psutil.Process] = []
    try:
        while text_of(run_dir).count('"step.completed"') < num_steps:
            assert process.poll() is None, (run_dir / "engine.log").read_text()
            assert time.monotonic() < deadline, "the moment to kill did not come"
            threading.Event().wait(0.01)
        threading.Event().wait(rest_s)
    finally:
        family = _family(process)
        for one in family:
            one.kill()
        process.wait()
        psutil.wait_procs(family, timeout=10)
    text = text_of(run_dir)
    (run_dir / "events.jsonl").write_text(text[: text.rfind("\n") + 1])
    assert not (run_dir / "outcome.json").exists(), "it was killed before its end"


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    engine = psutil.Process(process.pid)
    return [engine, *engine.children(recursive=True)]
