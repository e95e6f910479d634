"""The same from a terminal: `grpo` submits, shows, steers and fetches."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoModelForCausalLM

from tests.cli.terminal import grpo
from tests.stack import LiveStack, job_spec


def test_a_job_from_submit_to_pull(server: LiveStack, tmp_path: Path) -> None:
    spec = job_spec("file-later", num_steps=2)
    del spec["training_file"]
    (tmp_path / "job.json").write_text(json.dumps(spec))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(16)))

    def run(*words: str, code: int = 0) -> str:
        answer = grpo(*words, cwd=tmp_path, GRPO_BASE_URL=server.url)
        assert answer.returncode == code, answer.stderr
        return answer.stdout

    # Upload, submit, and stay until the end: a line a step, exit code 0.
    shown = run("submit", "job.json", "--training-file", "rows.jsonl", "--wait")
    lines = [line for line in shown.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert "kl/ref k3  0.0000" in lines[0]
    job_id = next(word for word in shown.split() if word.startswith("ftjob-"))
    assert "succeeded" in shown.splitlines()[-1]

    # Programs read JSON; people read tables.
    job = json.loads(run("watch", job_id, "--json"))
    assert (job["id"], job["status"]) == (job_id, "succeeded")
    assert job_id in run("list")
    assert [row["step"] for row in json.loads(run("metrics", job_id, "--json"))] == [1, 2]
    assert run("metrics", job_id, "--csv", "--name", "reward/mean").splitlines()[0].endswith("reward/mean")
    assert "job.succeeded" in run("events", job_id)
    assert "beta 0.04" in run("control", job_id)
    assert "tiny" in run("models")
    run("logs", job_id)

    # The checkpoint becomes a folder that loads.
    run("pull", job_id, "--to", "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    # What cannot be done is said, with exit code 1.
    assert run("cancel", job_id, code=1) == ""
    assert run("watch", "ftjob-unknown", code=1) == ""
