"""Train SmolLM2-135M-Instruct on the arithmetic example in three ways and record the watched metrics.

    python -m tests.golden.record_example [fixed|healthy|overshoot ...]      10 to 40 minutes; writes tests/golden/example_runs.json

`fixed`: the example with beta held at 0.04. The policy takes the cheap part of the reward (a bare number, whatever it is).
`healthy`: only the right number pays, however it is worded; learning rate 1e-6, in fp32, because the rounding of bf16 weights alone
puts KL at 0.02 to 0.08 here.
`overshoot`: the example's rule with a target of 0.05; KL leaves the band, beta climbs, KL comes back.
The held-out file asks for small sums with their whole equation: a policy that answers any question with a bare number fails it.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.recordings import Recording, keep, write

TARGET = Path(__file__).with_name("example_runs.json")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNS: dict[str, dict[str, Any]] = {
    "fixed": {"beta": {"rule": "fixed", "value": 0.04}, "limits": {"num_steps": 30}},
    "healthy": {
        "beta": {"rule": "fixed", "value": 0.04},
        "optimizer": {"learning_rate": 1e-6},
        "resources": {"precision": "fp32"},
        "grader": {"type": "number"},
        "limits": {"num_steps": 25},
    },
    "overshoot": {
        "beta": {"rule": "deadband", "value": 0.04, "target": 0.05, "min": 0.04, "up": 1.5, "update_every": 1, "ema_decay": None},
        "limits": {"num_steps": 30},
    },
}
HELD_OUT = {"every": 4, "grader": {"type": "string_check", "reference": "{{item.reference_answer}}", "operation": "like"}}


def spec_of(name: str) -> dict[str, Any]:
    """The example's spec with what the run changes."""
    spec = copy.deepcopy(json.loads((EXAMPLES / "arithmetic.json").read_text(encoding="utf-8")))
    grpo: dict[str, Any] = spec["method"]["grpo"]
    grpo.update(RUNS[name], checkpoints={"resume_every": 1_000_000})
    if name != "overshoot":
        grpo["evaluation"] = HELD_OUT
    return dict(spec)


def held_out() -> str:
    """Small sums whose whole equation is asked for, as rows of a held-out file."""
    rows = []
    for first in range(1, 6):
        for second in range(1, 6):
            question = f"What is {first} + {second}? Write the whole sum with its result."
            rows.append({"messages": [{"role": "user", "content": question}], "reference_answer": f"{first} + {second} = {first + second}"})
    return "".join(json.dumps(row) + "\n" for row in rows)


def record(root: Path, name: str) -> Recording:
    """Train one run in a process of its own and keep its watched metrics."""
    run_dir = root / name
    run_dir.mkdir()
    (run_dir / "held_out.jsonl").write_text(held_out(), encoding="utf-8")
    dispatch = {"spec": spec_of(name), "training_file": str(EXAMPLES / "arithmetic.jsonl")}
    if "evaluation" in spec_of(name)["method"]["grpo"]:
        dispatch["validation_file"] = str(run_dir / "held_out.jsonl")
    (run_dir / "dispatch.json").write_text(json.dumps(dispatch), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "grpo_engine", str(run_dir)], check=True)
    return keep(run_dir)


def main() -> None:
    """Record the named runs, or every one; the others stay as they are."""
    recorded = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    with tempfile.TemporaryDirectory() as directory:
        for name in sys.argv[1:] or RUNS:
            recorded[name] = record(Path(directory), name)
            write(TARGET, {known: recorded[known] for known in RUNS if known in recorded})


if __name__ == "__main__":
    main()
