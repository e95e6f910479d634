"""How many maths verdicts a second the grader processes give, on completions of many kinds.

python benchmarks/grader_verdicts.py [--verdicts 10000] [--processes 2]
"""

from __future__ import annotations

import argparse
import time

from grpo_engine.contract.grader import Math
from grpo_engine.grader import Sample, make_grader

KINDS = (
    ("{n}", "First I add, then I carry. So \\boxed{{{n}}}."),
    ("{n}", "The total is {n} cups.\n#### {n}"),
    ("\\frac{{{n}}}{{7}}", "Hence $x = \\dfrac{{{n}}}{{7}}$."),
    ("{n}", "<think>maybe {n}1</think><answer>${n}.00</answer>"),
    ("{n}\\sqrt{{2}}", "The answer is $\\sqrt{{2}}\\cdot {n}$"),
    ("x^2+{n}x", "\\boxed{{x(x+{n})}}"),
    ("(1,{n})", "\\boxed{{(1, {n})}}"),
    ("{n}", "I do not know, perhaps {n}7?"),
)


def main() -> None:
    """Print the rate; one line a kind of grader use."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verdicts", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    samples = []
    for index in range(arguments.verdicts):
        reference, completion = KINDS[index % len(KINDS)]
        number = 10 + index // len(KINDS)
        samples.append(Sample({"reference_answer": reference.format(n=number)}, completion.format(n=number)))
    with make_grader(Math(type="math"), processes=arguments.processes) as grader:
        grader.score(samples[:2])
        start = time.perf_counter()
        scores = grader.score(samples)
        seconds = time.perf_counter() - start
    faults = sum(score.error is not None for score in scores)
    right = sum(score.value == 1.0 for score in scores)
    print(f"{len(scores)} verdicts in {seconds:.1f} s, {len(scores) / seconds:.0f}/s, {arguments.processes} processes")
    print(f"{right} right, {faults} faults")


if __name__ == "__main__":
    main()
