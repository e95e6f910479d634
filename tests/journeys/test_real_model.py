"""The example on the real model, through the whole server: what the README promises, measured.

SmolLM2-135M-Instruct comes with a PyPI package. The policy finds the cheap reward of the example within 16 steps; with beta
fixed at 0.04 its KL leaves every band.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from api.client.download import choose, download
from tests.stack import LiveStack, live_stack

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_S = 1500
STEPS = 16
"""By then the shortcut is taken: in a recorded run the reward rose by 0.26 and KL was above 1."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack(tmp_path_factory.mktemp("real"), lost_after_s=600.0, lease_ttl_s=60.0) as stack:
        yield stack


def example(training_file: str, **sections: Any) -> dict[str, Any]:
    spec = copy.deepcopy(json.loads((EXAMPLES / "arithmetic.json").read_text()))
    spec["training_file"] = training_file
    spec["method"]["grpo"].update(sections)
    return spec


def test_with_beta_fixed_the_policy_takes_the_cheap_reward_and_kl_leaves(server: LiveStack, tmp_path: Path) -> None:
    training_file = server.client.upload(EXAMPLES / "arithmetic.jsonl").id
    spec = example(training_file, beta=0.04, limits={"num_steps": STEPS})
    job = server.client.wait(server.client.create_job(spec).id, timeout_s=TIMEOUT_S)
    assert (job.status, job.error) == ("succeeded", None)

    rows = server.client.metrics(job.id)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    kl = [row.metrics["kl/ref/k3/mean"] for row in rows]
    assert kl[0] == 0.0
    assert all(isinstance(value, float) and math.isfinite(value) for value in kl)
    assert max(kl) > 0.1
    assert {row.metrics["beta/applied"] for row in rows} == {0.04}
    reward = [row.metrics["reward/mean"] for row in rows]
    assert fmean(reward[-5:]) - fmean(reward[:5]) >= 0.1
    fired = [event.data["detector"] for event in server.client.events(job.id, limit=1000).data if event.event == "detector.fired"]
    assert "kl_out_of_control" in fired

    folder = download(server.client, choose(server.client.checkpoints(job.id), None), tmp_path / "model")
    tuned, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3 + 4? Answer with just the number."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert tuned.generate(**prompt, max_new_tokens=8).shape[-1] > prompt["input_ids"].shape[-1]
    (converted,) = (path.parent for path in (server.data_dir / "cache").rglob("model.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(converted)
    assert any((a != b).any() for a, b in zip(tuned.parameters(), base.parameters(), strict=True))


def test_kl_is_exactly_zero_at_step_1_in_fp32(server: LiveStack) -> None:
    training_file = server.client.upload(EXAMPLES / "arithmetic.jsonl").id
    spec = example(
        training_file,
        resources={"precision": "fp32"},
        sampling={"group_size": 4, "prompts_per_step": 2, "max_completion_tokens": 16},
        limits={"num_steps": 1},
    )
    job = server.client.wait(server.client.create_job(spec).id, timeout_s=TIMEOUT_S)
    assert job.status == "succeeded"
    (row,) = server.client.metrics(job.id)
    assert [row.metrics[f"kl/ref/{name}/mean"] for name in ("k1", "k2", "k3")] == [0.0, 0.0, 0.0]
