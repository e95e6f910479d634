"""`grpo demo`: the example, trained end to end before your eyes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from rich.console import Console

from api.client.errors import ClientError
from api.client.sync import DEFAULT_URL, Grpo
from api.client.watch import Follower
from api.embedded.stack import Stack
from api.up import Interrupts, running_stack, tend_until
from grpo_engine.contract.view import Job
from jobs.settings import Settings

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
EXIT_INTERRUPTED = 130


class Demo:
    """Submits the example and follows it in a thread, while the main thread looks after the server."""

    def __init__(self, stack: Stack, console: Console, spec: dict[str, Any], rows: Path) -> None:
        self._console = console
        self._spec = spec
        self._rows = rows
        self._data_dir = stack.settings.data_dir
        self._client = Grpo(stack.url, stack.settings.api_key or None)
        self._follower: Follower | None = None
        self._thread = threading.Thread(target=self._run, name="demo", daemon=True)
        self.is_over = False
        self.job: Job | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Look no further; the job is left to the server."""
        if self._follower is not None:
            self._follower.stop()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            file = self._client.upload(self._rows)
            job = self._client.create_job({**self._spec, "training_file": file.id})
            self.job = job
            self._say(f"uploaded {self._rows.name} ({file.rows} rows), submitted job [bold]{job.id}[/bold]: {job.model}")
            self._follower = Follower(self._client, job, self._console)
            self.job = self._follower.follow()
            if self.job.is_terminal:
                self._report(self.job)
        except (ClientError, OSError) as error:
            self.error = error
        finally:
            self.is_over = True

    def _report(self, job: Job) -> None:
        words = f"job {job.id} {job.status}"
        if job.error is not None:
            words += f": {job.error.message}"
        self._say(f"[bold]{words}[/bold]")
        folder = self._data_dir / "jobs" / job.id / "attempts"
        self._say(f"telemetry    {folder / str(job.attempt) / 'events.jsonl'}")
        checkpoints = self._client.checkpoints(job.id)
        if checkpoints:
            newest = max(checkpoints, key=lambda checkpoint: checkpoint.step_number)
            where = max(folder.glob(f"*/checkpoints/{newest.name}"), key=lambda path: int(path.parents[1].name))
            self._say(f"checkpoint   {where}")
            self._say("load it      from transformers import AutoModelForCausalLM, AutoTokenizer")
            self._say(f"             model = AutoModelForCausalLM.from_pretrained({str(where)!r})")
            self._say(f"             tokenizer = AutoTokenizer.from_pretrained({str(where)!r})")

    def hints(self) -> None:
        """What to try while the server is up."""
        if self.job is None:
            return
        job_id, prefix = self.job.id, f"GRPO_BASE_URL={self._client.base_url} " if self._client.base_url != DEFAULT_URL else ""
        self._say(f"look closer  curl {self._client.base_url}/v1/fine_tuning/jobs/{job_id}/metrics")
        for command in ("metrics", "events", "logs", "pull"):
            self._say(f"             {prefix}grpo {command} {job_id}")

    def _say(self, words: str) -> None:
        self._console.print(words, highlight=False, soft_wrap=True)


def demo(settings: Settings, console: Console, *, should_exit: bool, spec_path: Path, rows_path: Path) -> int:
    """Run the example on an embedded server; returns the exit code.

    0: the job succeeded. 1: it failed, was cancelled, or could not be submitted. 130: interrupted before its end.
    """
    spec: dict[str, Any] = json.loads(spec_path.read_bytes())
    with running_stack(settings, console) as (stack, interrupts):
        shown = Demo(stack, console, spec, rows_path)
        shown.start()
        tend_until(stack, lambda: shown.is_over or interrupts.is_asked)
        if shown.error is not None:
            console.print(str(shown.error), style="bold red", highlight=False, soft_wrap=True, markup=False)
        elif shown.is_over and not should_exit:
            shown.hints()
            _stay(stack, interrupts, console)
        shown.stop()
        return _exit_code(shown)


def _stay(stack: Stack, interrupts: Interrupts, console: Console) -> None:
    console.print(f"the server stays up at {stack.url}; Ctrl-C stops it", highlight=False, soft_wrap=True)
    tend_until(stack, lambda: interrupts.is_asked)


def _exit_code(shown: Demo) -> int:
    if shown.error is not None:
        return 1
    if shown.job is None or not shown.job.is_terminal:
        return EXIT_INTERRUPTED
    return 0 if shown.job.status == "succeeded" else 1
