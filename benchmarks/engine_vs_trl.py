"""The engine's step against TRL's GRPOTrainer: same model, prompts, samples per step and dtype, both in one run.

    python benchmarks/engine_vs_trl.py [--prompts short|long] [--dtype bf16|fp32] [--steps 4] [--trl-python PATH]

Beside the ratio: the engine's step against the least time the same machine's matrix products and memory need for the same
tokens (`floor_s`), and peak memory beyond weights, gradients, optimizer state and the interpreter on both sides.

Each side runs in a process of its own; the first step of each is a warm-up and is not counted. TRL (`pip install
'.[bench]'`) may live in another virtual environment, named by --trl-python. Under bf16 both keep fp32 weights and compute
in bf16. Prints a table and writes JSON beside this file. Ratios count; seconds belong to the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_engine.learner import Learner

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Shape:
    """The work of one step."""

    prompts_per_step: int
    group_size: int
    max_completion_tokens: int
    words: int
    """Words of filler before the question."""


SHAPES = {"short": Shape(4, 8, 64, 0), "long": Shape(2, 16, 64, 430)}


def prompts(shape: Shape, count: int) -> list[list[dict[str, str]]]:
    """Conversations with seeded sums; the long shape puts filler before the question."""
    draw = random.Random(0)
    filler = "The clerk wrote one more line about the weather and the trains. "
    text = (filler * (shape.words // 12 + 1)).split()[: shape.words]
    rows = []
    for _ in range(count):
        question = f"What is {draw.randint(1, 99)}+{draw.randint(1, 99)}? Answer with just the number."
        rows.append([{"role": "user", "content": " ".join([*text, question])}])
    return rows


def peak_bytes() -> int:
    """Largest resident set of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def assembled(args: argparse.Namespace) -> Iterator[Learner]:
    """A learner put together as in a job, for the work that the options describe."""
    from grpo_engine.assemble import assemble
    from grpo_engine.contract.command import Dispatch
    from grpo_engine.contract.intake import resolve_spec
    from grpo_engine.events import EVENTS_FILE, EventLog

    shape = SHAPES[args.prompts]
    run_dir = Path(tempfile.mkdtemp())
    rows = prompts(shape, shape.prompts_per_step * (args.steps + 1))
    (run_dir / "data.jsonl").write_text("\n".join(json.dumps({"messages": row, "reference_answer": "1"}) for row in rows))
    spec = resolve_spec(
        {
            "model": args.model,
            "training_file": "file-local",
            "method": {
                "type": "grpo",
                "grpo": {
                    "beta": 0.04,
                    "sampling": {
                        "group_size": shape.group_size,
                        "prompts_per_step": shape.prompts_per_step,
                        "max_completion_tokens": shape.max_completion_tokens,
                    },
                    "optimizer": {"learning_rate": 1e-6},
                    "grader": {"type": "regex", "pattern": "[0-4]"},
                    "resources": {"precision": args.dtype},
                    "limits": {"num_steps": args.steps + 1},
                },
            },
        }
    )
    dispatch = Dispatch(spec=spec, training_file="data.jsonl", cache_dir=args.cache)
    log = EventLog(run_dir / EVENTS_FILE, 1)
    with assemble(dispatch, run_dir, log) as learner:
        yield learner


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's own step function."""
    from grpo_engine.step import train_step

    interpreter = peak_bytes()
    with assembled(args) as learner:
        policy, reference = learner.policy, learner.reference
        masters = list(policy.masters.values())
        state = [*masters, *policy.model.parameters(), *(reference.model.parameters() if reference else ())]
        state_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in state}.values()) + 3 * sum(tensor.nbytes for tensor in masters)
        embedding = policy.model.get_output_embeddings().weight.numel()
        results, work = [], []
        for step in range(1, args.steps + 2):
            done = train_step(learner, step)
            results.append(done.metrics)
            lengths = [len(completion.token_ids) for _, completion in done.rollout.rows]
            prompt_tokens = sum(len(group.prompt.token_ids) for group in done.rollout.groups)
            work.append({"prompt_tokens": prompt_tokens, "completion_tokens": sum(lengths), "passes": max(lengths)})
            learner.step = step
        body = policy.num_in_memory - embedding
    steps = results[1:]
    phases = {name: statistics.fmean(m[f"time/{name}_s"] for m in steps) for name in ("sample", "grade", "reference", "update")}
    return {
        "side": "engine",
        "step_s": [m["time/step_s"] for m in steps],
        "phases_s": phases,
        "completion_tokens": statistics.fmean(m["completion/length_mean"] for m in steps),
        "interpreter_bytes": interpreter,
        "state_bytes": state_bytes,
        "peak_bytes": peak_bytes(),
        "work": work[1:],
        "body_parameters": body,
        "head_parameters": embedding,
    }


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    """TRL's trainer with the same samples per step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    interpreter = peak_bytes()
    shape = SHAPES[args.prompts]
    rows = shape.prompts_per_step * shape.group_size
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    seconds: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.started)

        def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
            if logs and "completions/mean_length" in logs:
                lengths.append(logs["completions/mean_length"])

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [1.0 if any(digit in row[0]["content"] for digit in "01234") else 0.0 for row in completions]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=rows // 8,
        num_generations=shape.group_size,
        max_completion_length=shape.max_completion_tokens,
        beta=0.04,
        learning_rate=1e-6,
        max_steps=args.steps + 1,
        bf16=args.dtype == "bf16",
        gradient_checkpointing=False,
        loss_type="grpo",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    weights = sum(parameter.nbytes for parameter in model.parameters())
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row} for row in prompts(shape, shape.prompts_per_step * (args.steps + 1))]),
        callbacks=[Clock()],
    )
    trainer.train()
    return {
        "side": "trl",
        "step_s": seconds[1:],
        "completion_tokens": statistics.fmean(lengths[1:]),
        "interpreter_bytes": interpreter,
        "state_bytes": 5 * weights,
        "peak_bytes": peak_bytes(),
    }


def roofline() -> dict[str, float]:
    """What this machine reaches: matrix products in GFLOP/s, and reading memory in GB/s."""
    import torch

    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        left, right = torch.randn(2048, 1536).to(dtype), torch.randn(1536, 1536).to(dtype)
        found[name] = 2 * 2048 * 1536 * 1536 / fastest(lambda left=left, right=right: left @ right) / 1e9  # type: ignore[misc]
    weights = torch.randn(2**28)  # 1 GiB: more than any cache
    found["read_gb_s"] = weights.nbytes / fastest(weights.sum) / 1e9
    return found


def fastest(work: Callable[[], Any], count: int = 8) -> float:
    """Seconds of the quickest of some calls."""
    best = float("inf")
    for _ in range(count):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def floor_s(ours: dict[str, Any], machine: dict[str, float], dtype: str) -> float:
    """The least seconds a step can take: each prompt once a group, each completion token once, every decode pass reading
    the weights once, forward and backward without any recomputation, and AdamW reading and writing its state once."""
    body, head = ours["body_parameters"], ours["head_parameters"]
    flops, read, width = machine[dtype] * 1e9, machine["read_gb_s"] * 1e9, 2 if dtype == "bf16" else 4
    total = 0.0
    for step in ours["work"]:
        tokens = step["prompt_tokens"] + step["completion_tokens"]
        forward = 2 * body * tokens + 2 * head * step["completion_tokens"]
        decode = max(step["passes"] * (body + head) * width / read, 2 * (body + head) * step["completion_tokens"] / flops)
        total += decode + (2 * body * step["prompt_tokens"] + 4 * forward) / flops + 28 * (body + head) / read
    return total / len(ours["work"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", choices=SHAPES, default="short")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--cache", default=str(Path("~/.cache/grpo").expanduser()))
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(run_ours(args) if args.side == "ours" else run_trl(args)))
        return

    def side(name: str, python: str, model: str) -> dict[str, Any]:
        command = [python, __file__, "--side", name, "--prompts", args.prompts, "--dtype", args.dtype, "--steps", str(args.steps)]
        command += ["--model", model, "--cache", args.cache]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
        if answer.returncode:
            sys.exit(f"{name} failed:\n{answer.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
        return result

    ours = side("ours", sys.executable, args.model)
    folder = next(path.parent for path in Path(args.cache).rglob("*.safetensors"))
    trl = side("trl", args.trl_python, str(folder))
    mean = {row["side"]: statistics.fmean(row["step_s"]) for row in (ours, trl)}
    machine = roofline()
    floor = floor_s(ours, machine, args.dtype)
    rest = {row["side"]: row["peak_bytes"] - row["interpreter_bytes"] - row["state_bytes"] for row in (ours, trl)}
    report = {
        "prompts": args.prompts,
        "dtype": args.dtype,
        "machine": {"processor": platform.processor() or platform.machine(), "roofline": machine},
        "engine": ours,
        "trl": trl,
        "ratio": mean["trl"] / mean["engine"],
        "floor_s": floor,
        "engine_over_floor": mean["engine"] / floor,
        "rest_bytes": rest,
        "rest_ratio": rest["engine"] / rest["trl"],
    }
    path = HERE / f"engine_vs_trl.{args.prompts}.{args.dtype}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{args.prompts}, {args.dtype}: engine {mean['engine']:.2f} s/step, TRL {mean['trl']:.2f} s/step, {report['ratio']:.1f} times")
    print(f"  engine by phase: {', '.join(f'{name} {value:.2f} s' for name, value in ours['phases_s'].items())}")
    print(f"  floor of this machine {floor:.2f} s/step; the engine takes {mean['engine'] / floor:.2f} times that")
    for row in (ours, trl):
        print(
            f"  {row['side']}: {row['completion_tokens']:.1f} tokens a completion, peak {row['peak_bytes'] / 2**30:.2f} GiB, "
            f"beyond weights, gradients, optimizer and interpreter {rest[row['side']] / 2**30:.2f} GiB"
        )
    print(f"  written to {path}")


if __name__ == "__main__":
    main()
