"""Random SIGKILLs over API, dispatcher, worker, pool child, engine and Redis while jobs are submitted; then the six oracles.

`python -m tests.faults.kill_loop --kills 200 [--seed N]` is the soak. The seed decides victims and moments; it is printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from api.client.errors import ClientError
from tests.faults.ground import Ground, ground
from tests.stack import wait_for

VICTIMS = ("engine", "engine", "pool child", "worker", "dispatcher", "api", "valkey")
STEPS = 30
STARTS_WITHIN_S = 25.0
ENDS_WITHIN_S = 900.0
"""Of the jobs that were running at the last kill; generous, as the soak may share its machine."""
PATIENT = {"max_crashes": 10_000, "max_worker_losses": 10_000, "max_stuck_attempts": 10_000, "retry_backoff_s": 1e-6}
"""A random kill is no poison: nobody shall give up for its sake, nor wait longer with each."""


def kill_loop(directory: Path, *, kills: int, seed: int, say: Callable[[str], None] = print) -> Counter[str]:
    """So many kills; returns how often each part was hit. Raises AssertionError where an oracle is wrong."""
    say(f"kill loop: {kills} kills, seed {seed}")
    dice = random.Random(seed)
    with ground(directory, scripted=False, **PATIENT) as server:
        like = server.like(STEPS)
        server.oracles.judge(next(iter(server.ledger.list_jobs().data)).id, "succeeded", like)
        spec = server.spec(steps=STEPS)
        hit: Counter[str] = Counter()
        submitted: dict[str, str] = {}
        while sum(hit.values()) < kills:
            if sum(not server.job(job_id).is_terminal for job_id in submitted.values()) < 2:
                _submit(server, spec, submitted)
            _let_it_train(server, submitted, dice)
            victim = dice.choice(VICTIMS)
            if _kill(server, victim):
                hit[victim] += 1
                say(f"kill {sum(hit.values())}: {victim}")
        for name, child in server.stack.children.items():
            if not child.is_running:
                server.restart(name)
        for job_id in submitted.values():
            server.end(job_id, "succeeded", like, timeout_s=ENDS_WITHIN_S)
        assert len(server.ledger.list_jobs(limit=1000).data) == len(submitted) + 1, "a create that was tried again made a second job"
        epochs = [server.job(job_id).epoch for job_id in submitted.values()]
        assert sum(epochs) > len(submitted), "no kill has cost an attempt: the loop proves nothing"
        say(f"{len(submitted)} jobs, {sum(epochs)} attempts, {server.oracles.looks} looks; hit: {dict(hit)}")
        return hit


def _let_it_train(server: Ground, submitted: dict[str, str], dice: random.Random) -> None:
    """A moment; and two times of three some steps more, so that kills fall into training and not into starts alone."""
    if dice.random() < 2 / 3:
        enough = _steps_written(server, submitted) + dice.randint(1, 8)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while _steps_written(server, submitted) < enough and time.monotonic() < deadline:
            _rest(0.05)
            if all(server.job(job_id).is_terminal for job_id in submitted.values()):
                break
    _rest(dice.uniform(0.0, 2.0))


def _steps_written(server: Ground, submitted: dict[str, str]) -> int:
    return sum(server.written(job_id, epoch) for job_id in submitted.values() for epoch in server.artifacts.epochs(job_id))


def _submit(server: Ground, spec: dict[str, object], submitted: dict[str, str]) -> None:
    """Post a job until it is acknowledged, whatever becomes of the API meanwhile."""
    key = f"job-{len(submitted)}"
    deadline = time.monotonic() + 120
    while True:
        try:
            submitted[key] = server.client.create_job(spec, idempotency_key=key).id
            return
        except ClientError:
            if time.monotonic() > deadline:
                raise


def _kill(server: Ground, victim: str) -> bool:
    """SIGKILL a part and start it again; False when there is none to kill at this moment."""
    if victim in ("engine", "pool child"):
        engines = server.engines()
        if not engines:
            return False
        try:
            (engines[0] if victim == "engine" else psutil.Process(engines[0].ppid())).kill()
        except psutil.NoSuchProcess:
            return False
        return True
    server.kill(victim)
    server.stack.children[victim].start()
    return True


def _rest(seconds: float) -> None:
    threading.Event().wait(seconds)


def main() -> None:
    """The soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        hit = kill_loop(Path(directory), kills=options.kills, seed=options.seed)
    wait_for(lambda: sum(hit.values()) == options.kills, "all kills", 1)
    sys.stdout.write("every oracle held\n")


if __name__ == "__main__":
    main()
