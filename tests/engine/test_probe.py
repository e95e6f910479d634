"""A probe does the job's own first step, tells its numbers, and changes nothing."""

from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_engine import assemble as learner_module
from grpo_engine import probe
from grpo_engine.__main__ import read_dispatch
from grpo_engine.assemble import assemble
from grpo_engine.contract.event import EXIT_CONFIG, EXIT_DIVERGED, EXIT_SUCCEEDED
from grpo_engine.contract.probe_view import Probe
from grpo_engine.contract.view_base import NonFinite
from grpo_engine.events import EventLog
from grpo_engine.learner import Learner
from grpo_engine.probe_report import main_memory, number
from grpo_engine.probe_steps import rehearse
from tests.engine.runs import make_job, make_run, make_spec, outcome, series, train

EXACT = {
    "kl": {"estimator": "exact", "direction": "policy_ref"},
    "sampling": {"prompts_per_step": 4, "group_size": 3},
    "loss": {"num_iterations": 2},
    "grader": {"type": "regex", "pattern": "[13579]"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("probe"))


def probed(root: Path, name: str, spec: dict[str, Any] | None = None, seconds: float = 100.0, **dispatch: Any) -> tuple[int, Probe | None]:
    """The exit code and what was found."""
    run_dir = make_run(root, name, spec, **dispatch)
    code = probe.run(run_dir, seconds)
    path = run_dir / probe.PROBE_FILE
    return code, Probe.model_validate_json(path.read_bytes()) if path.exists() else None


def found(root: Path, name: str, spec: dict[str, Any] | None = None, seconds: float = 100.0, **dispatch: Any) -> Probe:
    code, answer = probed(root, name, spec, seconds, **dispatch)
    assert (code, outcome(root / "attempts" / name).status) == (EXIT_SUCCEEDED, "succeeded")
    assert answer is not None
    return answer


def learner_of(root: Path, name: str, spec: dict[str, Any] | None = None) -> AbstractContextManager[Learner]:
    run_dir = make_run(root, name, spec)
    return assemble(read_dispatch(run_dir / "dispatch.json"), run_dir, EventLog(run_dir / "events.jsonl", 1))


@pytest.mark.parametrize(
    "grpo", [{}, EXACT, {"resources": {"precision": "bf16"}}, {"adapter": {"type": "lora", "rank": 4}}], ids=["k3", "exact", "bf16", "lora"]
)
def test_its_numbers_are_those_of_the_jobs_first_step(root: Path, request: pytest.FixtureRequest, grpo: dict[str, Any]) -> None:
    name, spec = request.node.callspec.id, make_spec(root, **grpo, limits={"num_steps": 1})
    answer = found(root, f"probe-{name}", spec)
    job = series(train(root, f"job-{name}", spec))[1]
    assert answer.is_whole_step
    assert answer.groups_probed == answer.groups_per_step == spec["method"]["grpo"]["sampling"]["prompts_per_step"]
    assert answer.kl is not None
    assert answer.kl.value == 0.0
    assert answer.kl.by_estimator == {each: job[f"kl/ref/{each}/mean"] for each in answer.kl.by_estimator}
    assert set(answer.kl.by_estimator) >= {"k1", "k2", "k3", "abs", answer.kl.estimator}
    assert answer.reward_mean == job["reward/mean"]
    assert answer.reward_std == job["reward/std"]
    assert answer.zero_variance_share == job["groups/zero_std_frac"]
    assert answer.truncated_share == job["completion/truncated_frac"]
    assert answer.mean_completion_tokens == job["completion/length_mean"]
    assert answer.failed_share == 0


@pytest.mark.parametrize("grpo", [{}, {**EXACT, "resources": {"precision": "bf16"}}], ids=["fp32", "bf16"])
def test_nothing_of_the_run_changes(root: Path, request: pytest.FixtureRequest, grpo: dict[str, Any]) -> None:
    spec = make_spec(root, **grpo, optimizer={"learning_rate": 1.0, "weight_decay": 0.5, "warmup_steps": 0})
    with learner_of(root, f"still-{request.node.callspec.id}", spec) as learner:
        weights = {key: value.clone() for key, value in learner.policy.weights().items()}
        computed = {key: value.clone() for key, value in learner.policy.network.module.state_dict().items()}
        before = (learner.dataset.cursor(), learner.rule.state(), learner.step, learner.grpo, learner.optimizer)
        result = rehearse(learner, math.inf)
        assert result.first.quarantine is None
        assert result.first.metrics["grad_norm/total"] > 0, "an update was prepared"
        after = learner.policy.weights()
        assert [key for key in weights if not torch.equal(weights[key], after[key])] == []
        assert [key for key, value in learner.policy.network.module.state_dict().items() if not torch.equal(computed[key], value)] == []
        assert (learner.dataset.cursor(), learner.rule.state(), learner.step, learner.grpo, learner.optimizer) == before
        assert learner.optimizer.state() == {}
        assert all(master.grad is None for master in learner.policy.masters.values())


def test_a_directory_holds_no_weights_afterwards(root: Path) -> None:
    found(root, "bare")
    assert {path.name for path in (root / "attempts" / "bare").iterdir()} == {"dispatch.json", "events.jsonl", "outcome.json", "probe.json"}


def test_time_memory_and_sizes_are_told(root: Path) -> None:
    answer = found(root, "sizes")
    seconds = answer.seconds
    assert seconds.reference is not None
    assert seconds.update is not None
    assert min(seconds.sampling, seconds.grading, seconds.reference, seconds.update, seconds.load) > 0
    assert seconds.sampling + seconds.grading + seconds.reference + seconds.update <= seconds.step
    assert answer.estimated_seconds == pytest.approx(seconds.load + 6 * seconds.step)
    assert answer.memory.kind == "process"
    assert 50e6 < answer.memory.peak_bytes < (answer.memory.total_bytes or 0)
    assert (answer.device, answer.precision, answer.context_length, answer.prompts, answer.skipped_long_prompts) == (
        "cpu",
        "fp32",
        256,
        16,
        0,
    )
    assert 5 < answer.longest_prompt_tokens < 40
    assert answer.parameters == answer.trained_parameters > 50_000
    assert len(answer.samples) == 4
    assert {sample.reward for sample in answer.samples} <= {0.0, 1.0}
    assert answer.warnings == []


def test_a_step_too_long_for_the_time_is_scaled_up_from_a_few_groups(root: Path) -> None:
    spec = make_spec(root, sampling={"prompts_per_step": 8})
    answer = found(root, "part", spec, seconds=0.0)
    assert (answer.is_whole_step, answer.groups_probed, answer.groups_per_step) == (False, 2, 8)
    assert [warning.code for warning in answer.warnings] == ["partial_probe"]
    with learner_of(root, "part-2", spec) as learner:
        part = rehearse(learner, 0.0, clock=lambda: 1.0)
    assert part.seconds["step"] == pytest.approx(4 * part.first.metrics["time/step_s"])


def test_evaluations_and_the_time_limit_are_part_of_the_estimate(root: Path) -> None:
    plain = make_spec(root, evaluation={"every": 2, "max_prompts": 12})
    answer = found(root, "eval", plain, validation_file=str(root / "rows.jsonl"))
    seconds = answer.seconds
    assert answer.estimated_seconds == pytest.approx(seconds.load + 6 * seconds.step + 4 * (seconds.sampling + seconds.grading))
    limited = found(root, "limited", make_spec(root, limits={"num_steps": 10**6, "max_seconds": 7}))
    assert limited.estimated_seconds == limited.seconds.load + 7


def test_a_job_without_a_reference_has_no_kl(root: Path) -> None:
    answer = found(root, "free", make_spec(root, beta=0, kl={"monitor": False}))
    assert answer.kl is None
    assert answer.seconds.update is not None


def test_rollouts_that_are_redacted_are_not_shown(root: Path) -> None:
    assert found(root, "redacted", make_spec(root, telemetry={"rollouts_redact": True})).samples == []


NEVER_GRADED = {"type": "string_check", "operation": "eq", "reference": "{{item.no_such_column}}"}


@pytest.mark.parametrize("pattern", [".*", "^no number looks like this$"], ids=["always", "never"])
def test_equal_rewards_are_no_signal(root: Path, request: pytest.FixtureRequest, pattern: str) -> None:
    answer = found(root, f"equal-{request.node.callspec.id}", make_spec(root, grader={"type": "regex", "pattern": pattern}))
    assert answer.zero_variance_share == 1.0
    (warning,) = answer.warnings
    assert (warning.code, warning.param) == ("no_signal", "method.grpo.grader")


def test_completions_that_never_end_and_prompts_that_do_not_fit_are_told(tmp_path: Path) -> None:
    root = make_job(tmp_path, "TINY")
    with (root / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "+" * 400}], "reference_answer": "0"}) + "\n")
    answer = found(root, "1", make_spec(root, sampling={"max_completion_tokens": 2}))
    assert answer.truncated_share == 1.0
    assert (answer.prompts, answer.skipped_long_prompts) == (16, 1)
    told = {warning.code: warning.param for warning in answer.warnings}
    assert told["all_truncated"] == "method.grpo.sampling.max_completion_tokens"
    assert told["long_prompts"] == "training_file"


def test_a_grader_that_gives_no_number_is_told_and_nothing_is_made_up(root: Path) -> None:
    answer = found(root, "ungraded", make_spec(root, grader=NEVER_GRADED))
    assert answer.failed_share == 1.0
    assert (answer.reward_mean, answer.reward_std, answer.zero_variance_share, answer.kl) == (None, None, None, None)
    assert (answer.seconds.reference, answer.seconds.update) == (None, None)
    assert {sample.reward for sample in answer.samples} == {None}
    assert [warning.code for warning in answer.warnings] == ["grader_failed", "step_quarantined"]
    assert "no_such_column" in answer.warnings[0].message


def test_a_job_that_aborts_on_what_is_not_finite_fails_as_it_would(root: Path) -> None:
    code, answer = probed(root, "abort", make_spec(root, grader=NEVER_GRADED, optimizer={"on_nonfinite": "abort"}))
    assert (code, answer, outcome(root / "attempts" / "abort").reason) == (EXIT_DIVERGED, None, "nonfinite")


def test_a_reference_that_computes_otherwise_fails_as_the_job_would(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = learner_module.load_reference

    def crooked(*arguments: Any, **options: Any) -> Any:
        reference = real(*arguments, **options)
        with torch.no_grad():
            next(iter(reference.network.module.parameters())).add_(0.5)
        return reference

    monkeypatch.setattr(learner_module, "load_reference", crooked)
    code, answer = probed(root, "crooked")
    verdict = outcome(root / "attempts" / "crooked")
    assert (code, answer) == (EXIT_CONFIG, None)
    assert (verdict.reason, verdict.param) == ("reference_mismatch", "method.grpo.reference")


def test_a_missing_model_fails_as_the_job_would(root: Path) -> None:
    spec = {**make_spec(root), "model": str(root / "nowhere")}
    code, answer = probed(root, "gone", spec)
    train(root, "gone-job", spec)
    job, tried = outcome(root / "attempts" / "gone-job"), outcome(root / "attempts" / "gone")
    assert (code, answer, tried.param) == (EXIT_CONFIG, None, "model")
    assert (tried.reason, tried.message) == (job.reason, job.message)


def test_a_directory_in_use_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found(root, "used")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (root / "attempts" / "used").iterdir())
    assert probe.main([str(root / "attempts" / "used")]) == EXIT_CONFIG
    assert "must hold dispatch.json and be unused" in capsys.readouterr().err
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (root / "attempts" / "used").iterdir()) == before


def test_numbers_json_cannot_spell() -> None:
    assert number(math.nan) == NonFinite(nonfinite="nan")
    assert number(-math.inf) == NonFinite(nonfinite="-inf")
    assert number(0.0) == 0.0
    assert number(None) is None


def test_a_containers_limit_counts_as_its_memory(tmp_path: Path) -> None:
    machine = main_memory(())
    assert machine is not None
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("1048576\n")
    assert main_memory((tmp_path / "max",)) == main_memory((tmp_path / "none",)) == machine
    assert main_memory((tmp_path / "max", tmp_path / "limit")) == 2**20


def test_the_example_of_the_contract_has_every_field() -> None:
    (example,) = Probe.model_json_schema()["examples"]
    assert json.loads(Probe.model_validate(example).model_dump_json()) == example
    assert set(example) == set(Probe.model_fields)
