"""The API's reads under submit load, next to an MLflow server doing the same reads in the same run.

    python benchmarks/api.py [--small] [--mlflow-python PATH | --without-mlflow]

One API process on SQLite and Valkey holds 10,000 jobs, one of them with 1,000,000 metric points (50,000 steps of 20 metrics), and
200 readers follow a running job's stream while everything is measured. MLflow (`mlflow server`, SQLite, one worker) holds as many
runs and points. Both are read by 8 connections: a job or run, and a page of 1,000 points of one metric, while another connection
submits. MLflow lives in an environment of its own: --mlflow-python names it, else the script makes one (about 1 GB; the first
time takes minutes more). Prints a table and writes api.json (api.small.json) beside this file. Ratios count; milliseconds belong to
the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import venv
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from http_load import StreamReaders, Timings, closed_loop, get, open_loop, percentile, post  # noqa: E402

from api.embedded.valkey import EmbeddedValkey, free_port  # noqa: E402
from grpo_engine.contract.event import EngineEvent  # noqa: E402
from grpo_engine.contract.intake import resolve_spec  # noqa: E402
from jobs.ledger import open_ledger  # noqa: E402
from jobs.ledger.folding import fold  # noqa: E402
from jobs.live import Live  # noqa: E402
from jobs.settings import Settings, bare_environment  # noqa: E402
from jobs.tables import jobs, steps  # noqa: E402

JOBS = "/v1/fine_tuning/jobs"
METRICS = ["kl/ref/k3/mean", "beta/applied", "reward/mean", "time/step_s"]
CONNECTIONS = 8
SUBMITS_PER_S = 5.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Size:
    """How much there is, and how long each measurement takes."""

    jobs: int
    steps: int
    metrics: int
    readers: int
    seconds: float


FULL, SMALL = Size(10_000, 50_000, 20, 200, 8.0), Size(500, 2_500, 20, 40, 2.0)


class Ours:
    """Our server with its data."""

    def __init__(self, size: Size, directory: Path, stack: ExitStack) -> None:
        self.size = size
        valkey = EmbeddedValkey(directory / "valkey")
        stack.enter_context(process(valkey.command, bare_environment()))
        models = directory / "models" / "tiny"
        models.mkdir(parents=True)
        (models / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
        (models / "model.safetensors").write_bytes(bytes(4096))
        settings = Settings(
            data_dir=directory / "data", redis_url=valkey.url, port=free_port(), model_dir=directory / "models", min_free_bytes=0,
            sse_total=size.readers, log_level="WARNING",
        ).resolved()  # fmt: skip
        self.port, self.ledger, self.live = settings.port, open_ledger(settings), Live.connect(settings)
        stack.callback(self.ledger.close)
        self.names = [*METRICS, *(f"reward/grader/part{number}" for number in range(size.metrics - len(METRICS)))]
        self.body = {
            "model": "tiny",
            "training_file": self._keep_file(),
            "method": {"type": "grpo", "grpo": {"grader": {"type": "string_check", "reference": "{{item.answer}}"}, "beta": 0.04}},
        }
        self.big, self.running = self._job(), self._job()
        self.ids = [self.big, self.running, *self._fill_jobs()]
        self._fill_steps()
        self._start(self.running)
        command = [sys.executable, "-m", "api"]
        stack.enter_context(process(command, {**bare_environment(), **settings.to_env()}, cwd=HERE.parent))
        wait_for(f"http://127.0.0.1:{self.port}/healthz")
        self.seq = 0
        self.sent: dict[str, float] = {}

    def _keep_file(self) -> str:
        content = b"".join(b'{"prompt": "%d + %d = ", "answer": "%d"}\n' % (n, n, 2 * n) for n in range(1, 33))
        path = self.ledger.artifacts.file_content("file-sums")
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        self.ledger.add_file("file-sums", filename="sums.jsonl", purpose="fine-tune", num_bytes=len(content), sha256="0" * 64, rows=32)
        return "file-sums"

    def _job(self) -> str:
        return self.ledger.create_job(resolve_spec(self.body), training_path=self.ledger.artifacts.file_content("file-sums")).id

    def _start(self, job_id: str) -> None:
        dispatched = self.ledger.dispatch(job_id, from_epoch=0)
        assert dispatched is not None
        assert self.ledger.mark_running(job_id, dispatched.epoch, "worker-1") is not None

    def _fill_jobs(self) -> list[str]:
        """Finished jobs, as rows: their directories are not read."""
        with self.ledger.database.write() as connection:
            row = dict(connection.execute(sa.select(jobs).where(jobs.c.id == self.big)).one()._mapping)
            latest = json.dumps({"time": 1.7e9, "metrics": dict.fromkeys(METRICS, 0.1), "beta": {"beta": 0.04}})
            done = {**row, "state": "succeeded", "latest": latest, "step": 100, "finished_at": row["created_at"]}
            ids = [f"ftjob-{number:024d}" for number in range(self.size.jobs - 2)]
            rows = [{**done, "id": job_id, "created_at": row["created_at"] - number} for number, job_id in enumerate(ids)]
            connection.execute(sa.insert(jobs), rows)
        return ids

    def _fill_steps(self) -> None:
        draw = random.Random(1)
        with self.ledger.database.write() as connection:
            for start in range(1, self.size.steps + 1, 5000):
                rows = [
                    {
                        "job_id": self.big, "epoch": 1, "seq": step, "step": step, "time": 1.7e9 + step, "superseded": False,
                        "beta": '{"beta":0.04}', "metrics": json.dumps({name: draw.random() for name in self.names}),
                    }
                    for step in range(start, min(start + 5000, self.size.steps + 1))
                ]  # fmt: skip
                connection.execute(sa.insert(steps), rows)
            fold(connection, self.big, 0, self.size.steps)

    def publish(self) -> None:
        """One step of the running job, as worker and dispatcher bring it."""
        self.seq += 1
        data = {"metrics": dict.fromkeys(self.names, 0.5), "beta": {"beta": 0.04}}
        event = EngineEvent(epoch=1, seq=self.seq, time=time.time(), type="step.completed", step=self.seq, message="step", data=data)
        self.sent[f"1-{self.seq}"] = time.time()
        self.live.publish_event(self.running, event.to_line(), 1, self.seq)
        self.ledger.ingest(self.running, [event])

    def submit(self, number: int) -> bytes:
        """A create."""
        return post(JOBS, self.port, json.dumps({**self.body, "metadata": {"n": str(number)}}).encode())

    def job(self, number: int) -> bytes:
        """A read of one of the jobs."""
        return get(f"{JOBS}/{self.ids[number * 7919 % len(self.ids)]}", self.port)

    def page(self, number: int) -> bytes:
        """1,000 points of one metric, anywhere in the series."""
        start = number * 1000 % max(1, self.size.steps - 1000) + 1
        return get(f"{JOBS}/{self.big}/metrics?names=kl/ref/k3/mean&limit=1000&global_step_from={start}", self.port)

    def thinned(self, names: str) -> Callable[[int], bytes]:
        """The whole series in a thousand buckets."""
        return lambda _: get(f"{JOBS}/{self.big}/metrics?resolution=1000{names}", self.port)


class Mlflow:
    """An MLflow server with as much."""

    def __init__(self, python: str, size: Size, directory: Path, stack: ExitStack) -> None:
        self.size, self.port = size, free_port()
        directory.mkdir()
        database = directory / "mlflow.db"
        arguments = [str(database), str(size.jobs), str(size.steps), str(size.metrics)]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        furnish = [python, str(HERE / "mlflow_furnish.py"), *arguments]
        made = subprocess.run(furnish, check=True, capture_output=True, text=True, cwd=directory, env=environment)
        answer = json.loads(made.stdout.strip().splitlines()[-1])
        self.ids, self.experiment = answer["ids"], str(answer["experiment"])
        command = [
            python, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}", "--host", "127.0.0.1",
            "--port", str(self.port), "--workers", "1",
        ]  # fmt: skip
        stack.enter_context(process(command, environment, cwd=directory))
        wait_for(f"http://127.0.0.1:{self.port}/health")

    def submit(self, _: int) -> bytes:
        """A new run."""
        body = json.dumps({"experiment_id": self.experiment, "start_time": int(time.time() * 1000)}).encode()
        return post("/api/2.0/mlflow/runs/create", self.port, body)

    def job(self, number: int) -> bytes:
        """A read of one of the runs."""
        return get(f"/api/2.0/mlflow/runs/get?run_id={self.ids[number * 7919 % len(self.ids)]}", self.port)

    def page(self, _: int) -> bytes:
        """1,000 points of one metric."""
        path = f"/api/2.0/mlflow/metrics/get-history?run_id={self.ids[0]}&metric_key=metric_0&max_results=1000"
        return get(path, self.port)


@contextmanager
def process(command: list[str], environment: dict[str, str], cwd: Path | None = None) -> Iterator[None]:
    """A server that ends with the block, with everything it started."""
    running = subprocess.Popen(
        command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        os.killpg(running.pid, 15)
        try:
            running.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, 9)
            running.wait()


def wait_for(url: str, seconds: float = 240.0) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            DIRECT.open(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


async def under_submits(server: Ours | Mlflow, measure: Callable[[], Awaitable[Timings]]) -> dict[str, Any]:
    """A measurement while another connection submits."""
    submits = asyncio.create_task(open_loop(server.port, server.submit, per_s=SUBMITS_PER_S, seconds=server.size.seconds, connections=1))
    found = await measure()
    submitted = await submits
    return {**found.summary(), "submits": submitted.summary()}


async def reads(server: Ours | Mlflow) -> dict[str, Any]:
    """A job or run, and a page of points: as fast as 8 connections can, and at a pace every server should keep."""
    seconds, port = server.size.seconds, server.port
    found: dict[str, Any] = {}
    for name, target in (("job", server.job), ("page", server.page)):
        await closed_loop(port, target, connections=1, seconds=5, at_most=5)
        found[f"{name}_saturated"] = await under_submits(
            server,
            lambda target=target: closed_loop(port, target, connections=CONNECTIONS, seconds=seconds),  # type: ignore[misc]
        )
    return found


async def measure_ours(ours: Ours) -> dict[str, Any]:
    """Everything, with the readers listening."""
    readers = StreamReaders(ours.port, f"{JOBS}/{ours.running}/metrics/stream", ours.size.readers)
    await readers.open()
    over = threading.Event()

    def tell() -> None:
        while not over.wait(0.5):
            ours.publish()

    teller = threading.Thread(target=tell)
    teller.start()
    seconds, port = ours.size.seconds, ours.port
    try:
        found = await reads(ours)
        for name, target in (("job", ours.job), ("page", ours.page)):
            found[f"{name}_paced"] = await under_submits(
                ours,
                lambda target=target: open_loop(port, target, per_s=30, seconds=seconds),  # type: ignore[misc]
            )
        for name, names in (("thinned_one", "&names=kl/ref/k3/mean"), ("thinned_all", "")):
            timings = await closed_loop(port, ours.thinned(names), connections=1, seconds=2 * seconds, at_most=40)
            found[name] = timings.summary()
    finally:
        over.set()
        teller.join()
    await asyncio.sleep(1.0)
    await readers.close()
    lags = sorted(at - ours.sent[event] for event, times in readers.arrivals.items() if event in ours.sent for at in times)
    missed = sum(ours.size.readers - len(readers.arrivals.get(event, ())) for event in ours.sent)
    found["streams"] = {
        "readers": ours.size.readers, "ended": readers.num_ended, "events": len(ours.sent), "not_delivered": missed,
        "p50_ms": round(1000 * percentile(lags, 50), 1), "p99_ms": round(1000 * percentile(lags, 99), 1),
    }  # fmt: skip
    return found


def mlflow_python(given: str | None) -> str:
    """The interpreter of an environment with MLflow; made when none is given."""
    if given:
        return given
    home = Path(tempfile.gettempdir()) / "grpo-benchmark-mlflow"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        print(f"Installing MLflow into {home}: about 1 GB.", flush=True)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "mlflow>=3.17"], check=True)
        (home / "ready").touch()
    return str(python)


def table(found: dict[str, Any]) -> str:
    """What a person reads first."""
    lines = [f"{'':<24}{'requests/s':>12}{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}{'errors':>8}"]
    for side in ("ours", "mlflow"):
        for name, row in found.get(side, {}).items():
            if "per_s" in row:
                numbers = f"{row['per_s']:>12}{row['p50_ms']:>10}{row['p95_ms']:>10}{row['p99_ms']:>10}{row['errors']:>8}"
                lines.append(f"{side + ' ' + name:<24}{numbers}")
    streams = found["ours"]["streams"]
    lines.append(f"{streams['readers']} readers: step to reader p50 {streams['p50_ms']} ms, p99 {streams['p99_ms']} ms, "
                 f"{streams['not_delivered']} of {streams['events'] * streams['readers']} not delivered")  # fmt: skip
    for name, ratio in found.get("ratios", {}).items():
        lines.append(f"{name}: {ratio} times MLflow's requests/s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a twentieth of everything, in half a minute")
    parser.add_argument("--mlflow-python", help="interpreter of an environment that has MLflow")
    parser.add_argument("--without-mlflow", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the servers end as well
    size = SMALL if args.small else FULL
    found: dict[str, Any] = {
        "size": vars(size),
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    python = None if args.without_mlflow else mlflow_python(args.mlflow_python)
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as temporary:
        with ExitStack() as stack:
            found["ours"] = asyncio.run(measure_ours(Ours(size, Path(temporary) / "ours", stack)))
        if python is not None:
            with ExitStack() as stack:
                found["mlflow"] = asyncio.run(reads(Mlflow(python, size, Path(temporary) / "mlflow", stack)))
            version = [python, "-c", "import importlib.metadata as m; print(m.version('mlflow'))"]
            found["mlflow_version"] = subprocess.run(version, check=True, capture_output=True, text=True).stdout.strip()
            both = {name: (found["ours"][name]["per_s"], found["mlflow"][name]["per_s"]) for name in ("job_saturated", "page_saturated")}
            found["ratios"] = {name: round(mine / theirs, 1) for name, (mine, theirs) in both.items()}
    out = HERE / ("api.small.json" if args.small else "api.json")
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    print(f"raw numbers: {out}")


if __name__ == "__main__":
    main()
