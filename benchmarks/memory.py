"""Peak resident memory of short runs: what the settings that are meant to save memory save.

    python -m benchmarks.memory

Each row is a process of its own, one step of the example with completions as long as they may be (the grader pays for nothing,
so lengths follow the model). `beta 0` and `lora` must not hold a second set of weights (0.25 GiB in bf16 for this model).
"""

from __future__ import annotations

from typing import Any

from benchmarks.engine_runs import report, run

GIB = 2**30
LONG = {"sampling": {"max_completion_tokens": 256, "group_size": 16, "prompts_per_step": 2}}
ROWS: dict[str, dict[str, Any]] = {
    "example": {},
    "beta 0": {"beta": 0},
    "lora": {"adapter": {"type": "lora"}},
    "long": LONG,
    "long, beta 0": {**LONG, "beta": 0},
    "long, small micro-batch": {**LONG, "resources": {"micro_batch_tokens": 2048}},
    "long, activation checkpointing": {**LONG, "resources": {"activation_checkpointing": True}},
}


def main() -> None:
    """Run each row and print."""
    peaks = {}
    for name, sections in ROWS.items():
        result = run(1, **sections)
        tokens = result.steps[0]["completion/length_mean"]
        peaks[name] = {"peak_gib": round(result.peak_bytes / GIB, 3), "completion_tokens": tokens}
        print(name, peaks[name], flush=True)
    report("memory", {"rows": peaks})


if __name__ == "__main__":
    main()
