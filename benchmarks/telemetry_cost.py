"""The share of a step that is neither sampling, grading, reference nor update: metrics, detectors, events, rollouts kept.

    python -m benchmarks.telemetry_cost [--steps 8]

From one run of the example: the time from one `step.completed` to the next, less the phases of the step. Nothing is published in
between, so no tensor is written but the completions' own.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.engine_runs import report, run

PHASES = ("sample", "grade", "reference", "update", "checkpoint")


def main() -> None:
    """Run, subtract, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    result = run(arguments.steps)
    walls = [later - earlier for earlier, later in zip(result.times[:-1], result.times[1:], strict=True)]
    rest = [wall - sum(row.get(f"time/{name}_s", 0.0) for name in PHASES) for wall, row in zip(walls, result.steps[1:], strict=True)]
    shares = [part / wall for part, wall in zip(rest, walls, strict=True)]
    report(
        "telemetry_cost",
        {
            "step_s": [round(wall, 3) for wall in walls],
            "rest_s": [round(part, 4) for part in rest],
            "share": [round(share, 5) for share in shares],
            "median_share": round(statistics.median(shares), 5),
        },
    )


if __name__ == "__main__":
    main()
