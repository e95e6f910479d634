"""What it costs to measure the exact full-vocabulary KL at every step, beside the sampled estimators.

    python -m benchmarks.exact_kl_cost [--steps 5] [--rounds 2]

Trains the example alternately with and without `telemetry.exact_kl`. It changes no number of the training, so both sides sample
the same tokens; their step times from the second step on are set beside each other.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.engine_runs import report, run


def main() -> None:
    """Alternate, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    ratios, shares = [], []
    for _ in range(arguments.rounds):
        without = run(arguments.steps).steps
        measured = run(arguments.steps, telemetry={"exact_kl": True}).steps
        rewards = [[row["reward/mean"] for row in rows] for rows in (without, measured)]
        assert rewards[0] == rewards[1], "the measurement changed the training"
        ratios.append(sum(row["time/step_s"] for row in measured[1:]) / sum(row["time/step_s"] for row in without[1:]))
        for name in ("reference", "update", "sample"):
            pair = [sum(row[f"time/{name}_s"] for row in rows[1:]) for rows in (without, measured)]
            shares.append({"phase": name, "without_s": round(pair[0], 3), "with_s": round(pair[1], 3)})
    report("exact_kl_cost", {"step_ratio": [round(ratio, 4) for ratio in ratios], "median": statistics.median(ratios), "phases": shares})


if __name__ == "__main__":
    main()
