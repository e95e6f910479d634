"""Cases that need a run: a tiny model trained for a few steps by the engine itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from grpo_engine.batch import Prompt
from grpo_engine.dataset import Dataset
from grpo_engine.policy import load_module, weights_sha256
from tests.cases.registry import Bench, Case, runs
from tests.engine.model_fixtures import with_adapter
from tests.engine.runs import events, make_job, make_spec, outcome, series, text_of, train

ALWAYS0 = {"type": "string_check", "reference": "never said by anyone"}
REGEX_A = {"type": "regex", "pattern": "[0-4]"}


def run(bench: Bench, rows: list[dict[str, Any]] | None = None, kind: str = "TINY_SHORT", **grpo: Any) -> Path:
    root = make_job(bench.tmp_path, kind)
    if rows is not None:
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return train(root, spec=make_spec(root, **{"limits": {"num_steps": 2}, "checkpoints": {"resume_every": 100}, **grpo}))


@runs("A01", "B09")
def beta_zero_trains_without_nan(case: Case, bench: Bench) -> None:
    """Without a penalty KL is absent. On the first step the loss is 0 by construction; the gradient is not, and the run goes on."""
    run_dir = run(bench, beta=0, grader=REGEX_A)
    assert outcome(run_dir).status == "succeeded"
    assert "NaN" not in text_of(run_dir)
    assert "Infinity" not in text_of(run_dir)
    steps = series(run_dir)
    assert sorted(steps) == [1, 2]
    assert [step["beta/applied"] for step in steps.values()] == [0.0, 0.0]
    assert abs(steps[1]["loss/total"]) < 1e-4
    assert max(step["grad_norm/total"] for step in steps.values()) > 0


@runs("B02")
def every_group_is_full(case: Case, bench: Bench) -> None:
    """7 rows, 2 prompts a step: a step crosses into the next pass over the file, so no batch is ever short."""
    prompts = [Prompt(row=n, text=str(n), token_ids=[n], item={}) for n in range(7)]
    dataset = Dataset(prompts, seed=7, should_shuffle=True)
    taken = [dataset.take(2) for _ in range(14)]
    assert {len(batch) for batch in taken} == {2}
    assert sorted(prompt.row for batch in taken for prompt in batch) == sorted([*range(7)] * 4)


@runs("B07")
def graders_that_apply_to_some_rows(case: Case, bench: Bench) -> None:
    """A grader that does not apply to a row is absent from its metrics and adds nothing to its reward."""
    rows = [{"prompt": f"{k}+{k}=", **({"math_answer": str(2 * k)} if k <= 4 else {"keyword": "1"})} for k in range(1, 9)]
    graders = {
        "sum": {"type": "math", "reference": "{{item.math_answer}}", "if_missing": "skip"},
        "word": {"type": "string_check", "operation": "like", "reference": "{{item.keyword}}", "if_missing": "skip"},
    }
    run_dir = run(
        bench,
        rows,
        grader={"type": "multi", "graders": graders, "weights": {"sum": 0.5, "word": 0.5}},
        sampling={"group_size": 4, "prompts_per_step": 2},
        data={"shuffle": False},
        limits={"num_steps": 4},
    )
    assert "NaN" not in text_of(run_dir)
    (loaded,) = events(run_dir, "data.loaded")
    assert (loaded.level, loaded.data["num_untemplated"]) == ("warn", 8)
    assert "set data.prompt_as to 'user'" in loaded.message
    names = [{name for name in step if name.startswith("reward/grader/")} for step in series(run_dir).values()]
    assert [any("sum" in name for name in found) for found in names] == [True, True, False, False]
    assert [any("word" in name for name in found) for found in names] == [False, False, True, True]


@runs("C14")
def nothing_but_cut_completions(case: Case, bench: Bench) -> None:
    """Cut completions and groups without a signal are counted in every step; the detector `stagnation` says why nothing moves.
    (A random model emits the end token in one of 261 cases.)"""
    sampling = {"group_size": 4, "prompts_per_step": 2, "max_completion_tokens": case["input"]["job"]["max_completion_tokens"]}
    run_dir = run(
        bench,
        kind="TINY",
        grader=ALWAYS0,
        beta=0.04,
        sampling=sampling,
        limits={"num_steps": 10},
        diagnostics={"stagnation": {"window": 5}},
        optimizer={"learning_rate": 1e-6, "warmup_steps": 0},
    )
    steps = series(run_dir)
    assert sum(step["completion/truncated_frac"] for step in steps.values()) / len(steps) > 0.95
    assert {step["groups/zero_std_frac"] for step in steps.values()} == {1.0}
    (warning,) = events(run_dir, "detector.fired")
    assert warning.level == "warn"
    assert "100% of the groups have equal rewards" in warning.message


@runs("E07")
def merged_weights_answer_like_base_and_adapter(case: Case, bench: Bench) -> None:
    """A published checkpoint of an adapter job is the merged model; `adapter/` in it is the adapter alone, for peft over the base."""
    asked = case["input"]["job"]
    base_folder = bench.tmp_path / "model"
    run_dir = run(
        bench,
        kind="TINY",
        grader=REGEX_A,
        adapter={"type": "lora", "rank": asked["lora"]["r"]},
        limits={"num_steps": asked["steps"]},
        optimizer={"learning_rate": asked["learning_rate"], "warmup_steps": 0},
    )
    folder = run_dir / "checkpoints" / "step-000010"
    base, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (base_folder, folder))
    loaded_before = weights_sha256(dict(base.named_parameters()))
    assert events(run_dir, "model.loaded")[0].data["policy_sha256"] == loaded_before, "the base folder is as it was"
    ids = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        bare, answer = base(ids).logits, merged(ids).logits
        both = with_adapter(base, folder / "adapter")
        assert (answer - both(ids).logits).abs().max() <= 1e-4
        assert (answer - bare).abs().max() > 1e-4
        greedy = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(merged.generate(ids, **greedy), both.generate(input_ids=ids, **greedy))
    assert weights_sha256(dict(load_module(base_folder).named_parameters())) == loaded_before
