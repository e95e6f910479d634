"""One example of each call, for the OpenAPI document. Tests send every one of them to a server."""

from __future__ import annotations

from typing import Any

JOB, CHECKPOINT, FILE = "ftjob-0a1b2c3d4e5f60718293a4b5", "ftckpt-0a1b2c3d4e5f60718293a4b5", "file-0a1b2c3d4e5f60718293a4b5"
SWEEP, ENDPOINT, DELIVERY = "ftsweep-0a1b2c3d4e5f60718293a4b5", "whe-0a1b2c3d4e5f60718293a4b5", "whd-0a1b2c3d4e5f60718293a4b5"
MODEL = "smollm2-135m-instruct"

PARAMETERS: dict[str, Any] = {
    "job_id": JOB,
    "checkpoint_id": CHECKPOINT,
    "file_id": FILE,
    "sweep_id": SWEEP,
    "endpoint_id": ENDPOINT,
    "delivery_id": DELIVERY,
    "model": MODEL,
    "key": "nightly-2026-12-02",
    "jobs": [JOB],
    "names": ["kl/ref/k3/mean", "beta/applied"],
    "tail": 200,
    "created_after": 1_767_225_600,
    "idempotency-key": "nightly-2026-12-02",
}
"""Of path, query and header parameters, by name; where one is not required the example says how it looks."""

_GRADER = {"type": "string_check", "reference": "{{item.answer}}", "operation": "eq"}
_JOB = {
    "model": MODEL,
    "training_file": FILE,
    "method": {"type": "grpo", "grpo": {"beta": 0.04, "grader": _GRADER, "limits": {"num_steps": 25}}},
    "metadata": {"team": "alignment"},
}

BODIES: dict[str, dict[str, Any]] = {
    "JobSpec": _JOB,
    "Fork": {"overrides": {"method": {"grpo": {"beta": 0.08}}}, "suffix": "stricter"},
    "Promote": {"gates": {"max_ref_kl": 0.5}, "note": "the evaluation of December"},
    "ControlChange": {"beta": 0.08},
    "ReplayRequest": {"diagnostics": {"kl_out_of_control": {"kl": 0.05}}},
    "SweepSpec": {
        "name": "how much KL",
        "spec": _JOB,
        "variants": [{"beta": 0.01}, {"beta": 0.1}, {"name": "controller", "beta": {"rule": "deadband", "value": 0.02, "target": 0.05}}],
    },
    "RunRequest": {"grader": _GRADER, "model_sample": "4", "item": {"answer": "4"}},
    "ValidateRequest": {"grader": _GRADER},
    "NewEndpoint": {"name": "ci", "url": "https://hooks.example.com/grpo", "event_types": ["fine_tuning.job.succeeded"]},
    "EndpointChange": {"name": "ci of the team"},
    "RotateSecret": {"keep_old_secret_active_for_24_hours": True},
    "TestEndpoint": {"event_type": "fine_tuning.job.succeeded"},
}
"""Of bodies, by the name of their schema."""
