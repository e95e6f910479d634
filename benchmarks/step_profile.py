"""Where a step's time goes, by phase and kind of operation, beside what the same machine's matrix products reach.

    python benchmarks/step_profile.py [--prompts short|long] [--dtype bf16|fp32] [--steps 2]

torch.profiler's own time of each operation, summed over the counted steps of engine_vs_trl.py's work; the first step is a
warm-up. `python` is what a phase took beyond its operations: the interpreter, torch's dispatch and the profiler itself, which
is charged to the code it watches. Prints a table and writes JSON beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from engine_vs_trl import SHAPES, assembled, roofline  # noqa: E402

from grpo_engine.step import train_step  # noqa: E402

PHASES = ("sample", "reference", "update")
THIN_ROWS = 64
KINDS = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "mv", "dot", "_linear_pointwise"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    "optimizer": ("_fused_adamw_", "_foreach_norm", "_foreach_mul_", "linalg_vector_norm"),
    "copies": (
        "copy_", "clone", "cat", "index_select", "index", "index_put_", "_index_put_impl_", "index_add_", "index_copy_", "gather",
        "scatter_add_", "embedding_dense_backward", "fill_", "zero_", "constant_pad_nd", "masked_fill_", "stack", "repeat_interleave",
        "slice_backward", "select_backward", "index_backward", "embedding", "uniform_", "random_", "arange",
    ),
}  # fmt: skip
"""Whatever is named nowhere here is element-wise work: norms, gates, rotary positions, soft maxima, sums."""


def kind_of(event: FunctionEvent) -> str:
    """The row of the table an operation belongs to."""
    name = event.name.partition("::")[2]
    kind = next((kind for kind, names in KINDS.items() if name in names), "element-wise")
    if kind != "products":
        return kind
    return "thin products" if _rows(event) <= THIN_ROWS else "wide products"


def _rows(event: FunctionEvent) -> int:
    """Rows of the smaller side of a product: what decides whether it is bound by memory or by arithmetic."""
    shapes = [shape for shape in event.input_shapes if len(shape) >= 2]
    return min((min(shape[-2:]) for shape in shapes), default=1)


def _flop(event: FunctionEvent) -> float:
    """The profiler counts torch's own products; those with a packed weight are counted here."""
    if not event.name.endswith("::_linear_pointwise"):
        return float(event.flops)
    rows, *_, weight = [shape for shape in event.input_shapes if len(shape) >= 2]
    return 2.0 * math.prod(rows) * weight[0] if weight[1] == rows[-1] else 2.0 * math.prod(rows) * weight[1]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds, calls and floating-point operations of each phase and kind, by step."""
    with assembled(args) as learner:
        train_step(learner, 1)
        learner.step = 1
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as profiler:
            for step in range(2, args.steps + 2):
                train_step(learner, step)
                learner.step = step
    events = profiler.events()
    assert events is not None
    spans = [(event.time_range.start, event.time_range.end, event.name[6:]) for event in events if event.name.startswith("phase/")]
    spans = [span for span in spans if span[2] in PHASES]
    table: dict[str, dict[str, dict[str, float]]] = {phase: defaultdict(lambda: defaultdict(float)) for phase in PHASES}
    for start, end, phase in spans:
        table[phase]["python"]["seconds"] += (end - start) / 1e6 / args.steps
    for event in events:
        if "::" not in event.name:
            continue
        for start, end, phase in spans:
            if start <= event.time_range.start < end:
                cell = table[phase][kind_of(event)]
                cell["seconds"] += event.self_cpu_time_total / 1e6 / args.steps
                cell["calls"] += 1 / args.steps
                cell["gflop"] += _flop(event) / 1e9 / args.steps
                table[phase]["python"]["seconds"] -= event.self_cpu_time_total / 1e6 / args.steps
                break
    return {phase: {kind: dict(cell) for kind, cell in kinds.items()} for phase, kinds in table.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", choices=SHAPES, default="short")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--cache", default=str(Path("~/.cache/grpo").expanduser()))
    args = parser.parse_args()
    phases = measure(args)
    machine = roofline()
    print(f"{args.prompts}, {args.dtype}; this machine: {', '.join(f'{name} {value:.0f}' for name, value in machine.items())}")
    print(f"{'phase':<10} {'kind':<14} {'seconds':>8} {'calls':>8} {'GFLOP':>8} {'GFLOP/s':>8}")
    for phase, kinds in phases.items():
        for kind, cell in sorted(kinds.items(), key=lambda item: -item[1]["seconds"]):
            flop, seconds = cell.get("gflop", 0.0), cell["seconds"]
            print(
                f"{phase:<10} {kind:<14} {seconds:>8.2f} {cell.get('calls', 0):>8.0f} {flop:>8.0f} {flop / seconds if seconds else 0:>8.0f}"
            )
    path = HERE / f"step_profile.{args.prompts}.{args.dtype}.json"
    facts = {"prompts": args.prompts, "dtype": args.dtype, "threads": torch.get_num_threads(), "machine": machine}
    path.write_text(json.dumps({**facts, "phases": phases}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
