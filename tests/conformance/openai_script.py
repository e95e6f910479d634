"""What an application does with the openai SDK, whatever its version: run against a server, with any interpreter that has the SDK.

`python openai_script.py BASE_URL WEBHOOK_SECRET WEBHOOK_JSON` needs nothing but `openai`. Prints one JSON line: the SDK's version
and the names of the checks it made. A check that fails raises. The files of the webhook check hold `{"headers", "body"}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

ROWS = b"".join(b'{"prompt": "%d + 1 = ", "answer": "%d"}\n' % (n, n + 1) for n in range(16))
GRADER: dict[str, Any] = {
    "type": "string_check", "name": "g", "input": "{{sample.output_text}}", "reference": "{{item.answer}}", "operation": "eq",
}  # fmt: skip
METHOD: dict[str, Any] = {"type": "grpo", "grpo": {"grader": GRADER, "beta": 0.04, "limits": {"num_steps": 10}}}


class Application:
    """One user of the SDK."""

    def __init__(self, base_url: str, secret: str, delivery: dict[str, Any]) -> None:
        self.sdk: Any = openai.OpenAI(base_url=base_url, api_key="unused", webhook_secret=secret, max_retries=1)
        self.delivery = delivery
        self.done = delivery["finished_job"]

    def upload(self) -> Any:
        return self.sdk.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")

    def create(self, **more: Any) -> Any:
        return self.sdk.fine_tuning.jobs.create(model="tiny", training_file=self.upload().id, method=METHOD, **more)

    def files(self) -> None:
        made = [self.upload() for _ in range(3)]
        assert (made[0].object, made[0].status, made[0].bytes, made[0].purpose) == ("file", "processed", len(ROWS), "fine-tune")
        assert self.sdk.files.retrieve(made[0].id) == made[0]
        assert self.sdk.files.content(made[0].id).read() == ROWS
        listed = [file.id for file in self.sdk.files.list(limit=2)]
        assert listed[:3] == [file.id for file in reversed(made)]
        assert self.sdk.files.delete(made[0].id).deleted is True
        refuses(openai.NotFoundError, lambda: self.sdk.files.retrieve(made[0].id))

    def jobs(self) -> None:
        job = self.create(metadata={"team": "a"}, seed=7, suffix="mine")
        assert (job.object, job.status, job.error, job.finished_at) == ("fine_tuning.job", "queued", None, None)
        assert (job.seed, job.metadata, job.user_provided_suffix) == (7, {"team": "a"}, "mine")
        assert job.resolved["kl"]["estimator"] == "k3"
        assert self.sdk.fine_tuning.jobs.retrieve(job.id).id == job.id
        others = [self.create().id for _ in range(2)]
        listed = [one.id for one in self.sdk.fine_tuning.jobs.list(limit=1)]
        assert listed[:3] == [*reversed(others), job.id]
        assert len(listed) == len(set(listed))
        first = self.sdk.fine_tuning.jobs.list(limit=1)
        assert first.has_next_page()
        assert first.get_next_page().data[0].id == listed[1]
        assert self.sdk.fine_tuning.jobs.cancel(job.id).status == "cancelled"
        assert self.sdk.fine_tuning.jobs.retrieve(job.id).finished_at is not None

    def pause_and_resume(self) -> None:
        job = self.create()
        assert self.sdk.fine_tuning.jobs.pause(job.id).status == "paused"
        assert self.sdk.fine_tuning.jobs.resume(job.id).status == "queued"

    def reinforcement(self) -> None:
        method = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": {"num_steps": 5}}}
        job = self.sdk.fine_tuning.jobs.create(model="tiny", training_file=self.upload().id, method=method)
        assert job.resolved["grader"]["type"] == "string_check"
        method = {"type": "dpo", "dpo": {}}
        error = refuses(
            openai.UnprocessableEntityError,
            lambda: self.sdk.fine_tuning.jobs.create(model="tiny", training_file="file-1", method=method),
        )
        assert error.code == "unsupported_method"

    def events_and_checkpoints(self) -> None:
        events = list(self.sdk.fine_tuning.jobs.list_events(self.done, limit=2))
        assert len({event.id for event in events}) == len(events) >= 4
        assert {event.object for event in events} == {"fine_tuning.job.event"}
        assert {event.level for event in events} <= {"info", "warn", "error"}
        saved = list(self.sdk.fine_tuning.jobs.checkpoints.list(self.done, limit=1))
        assert [one.step_number for one in saved] == [2, 1]
        assert saved[0].fine_tuning_job_id == self.done
        assert self.sdk.fine_tuning.jobs.retrieve(self.done).fine_tuned_model == saved[0].id

    def models(self) -> None:
        assert "tiny" in {model.id for model in self.sdk.models.list()}
        model = self.sdk.models.retrieve("tiny")
        assert (model.id, model.object) == ("tiny", "model")
        refuses(openai.NotFoundError, lambda: self.sdk.models.retrieve("none"))

    def graders(self) -> None:
        run = self.sdk.fine_tuning.alpha.graders.run(grader=GRADER, model_sample="4", item={"answer": "4"})
        assert (run.reward, run.metadata.errors.other_error) == (1.0, False)
        checked = self.sdk.fine_tuning.alpha.graders.validate(grader=GRADER)
        assert checked.grader.type == "string_check"

    def errors(self) -> None:
        create = self.sdk.fine_tuning.jobs.create
        bad = refuses(openai.UnprocessableEntityError, lambda: create(model="tiny", training_file="file-none", method=METHOD))
        assert (bad.param, bad.status_code, bad.type) == ("training_file", 422, "invalid_request_error")
        assert bad.code
        assert bad.request_id
        assert "file-none" in bad.message
        misspelt = {"type": "grpo", "grpo": {"grader": GRADER, "bta": 1}}
        bad = refuses(openai.UnprocessableEntityError, lambda: create(model="tiny", training_file=self.upload().id, method=misspelt))
        assert bad.param == "method.grpo.bta"
        missing = refuses(openai.NotFoundError, lambda: self.sdk.fine_tuning.jobs.retrieve("ftjob-none"))
        assert missing.status_code == 404
        conflict = refuses(openai.ConflictError, lambda: self.sdk.fine_tuning.jobs.pause(self.done))
        assert conflict.response.request.headers["x-stainless-retry-count"] == "0"

    def streams(self) -> None:
        path = f"/fine_tuning/jobs/{self.done}/metrics/stream"
        found = list(self.sdk.get(path, cast_to=object, stream=True, stream_cls=openai.Stream[Any]))
        assert [item["step"] for item in found[:2]] == [1, 2]
        assert found[-1]["status"] == "succeeded"

    def webhooks(self) -> None:
        headers, body = self.delivery["headers"], self.delivery["body"]
        event = self.sdk.webhooks.unwrap(body, headers)
        assert (event.type, event.data.id) == ("fine_tuning.job.succeeded", self.done)
        refuses(openai.InvalidWebhookSignatureError, lambda: self.sdk.webhooks.unwrap(body.replace("succeeded", "failed"), headers))

    def checks(self) -> list[Callable[[], None]]:
        """All that this version of the SDK can do."""
        every = [
            self.files, self.jobs, self.pause_and_resume, self.reinforcement, self.events_and_checkpoints, self.models, self.graders,
            self.errors, self.streams,
        ]  # fmt: skip
        return [*every, self.webhooks] if hasattr(openai.OpenAI, "webhooks") else every


def refuses(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The error of a call that must fail so."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} came")


def main(base_url: str, secret: str, delivery_file: str) -> None:
    """Run every check."""
    with open(delivery_file, encoding="utf-8") as file:
        application = Application(base_url, secret, json.load(file))
    made = []
    for check in application.checks():
        check()
        made.append(check.__name__)
    print(json.dumps({"version": openai.__version__, "checks": made}))


if __name__ == "__main__":
    main(*sys.argv[1:])
