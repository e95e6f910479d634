"""Every setting of the server, and the one place that reads the environment.

Names are `GRPO_<FIELD IN CAPITALS>`; the database and Redis also answer to `DATABASE_URL` and `REDIS_URL`.
An unknown `GRPO_` variable is an error, so that a misspelt setting cannot be ignored.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from grpo_engine.contract.nearest import nearest

FOREIGN_VARIABLES = frozenset({"GRPO_JOB_ID", "GRPO_EPOCH", "GRPO_SUPERVISOR", "GRPO_RUN_DIR", "GRPO_BASE_URL"})
"""Variables with our prefix that are not settings: marks on engine processes, and the client's server address."""


class SettingsError(ValueError):
    """A setting cannot be used; the message names the variable and the remedy."""


@dataclass(frozen=True)
class Settings:
    """One deployment. Durations end in `_s` and are seconds; sizes end in `_bytes`."""

    data_dir: Path = Path(".grpo")
    """Everything the server keeps: database, uploads, job directories, caches. Absolute after `from_env`."""
    database_url: str = ""
    """SQLAlchemy URL; empty = SQLite in the data directory. `postgres://` and `postgresql://` use psycopg 3."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    host: str = "127.0.0.1"
    port: int = 8000
    model_dir: Path | None = None
    """Folder below which a job may name local models; null = none may be named."""
    allow_hub: bool = True
    """Whether jobs may name models on the Hugging Face Hub."""
    api_key: str = ""
    """A key with every scope, for the first start; further keys live in the database. Empty = none."""
    remote_grader_hosts: tuple[str, ...] = ()
    """Hosts a remote grader may be called on, as `host` (port 443) or `host:port`; empty = remote graders are refused."""
    remote_grader_secret_file: Path | None = None
    """File with the secrets that sign remote graders' requests, one `whsec_...` a line; needed with hosts."""
    remote_grader_allow_private: bool = False
    """Whether remote graders may be called over http and at addresses that are not public."""

    webhook_allow_private: bool = False
    """Whether webhooks may be sent over http and to addresses that are not public. Off: https and public addresses only."""
    webhook_retry_s: float = 5.0
    """Pause after the first failed try of a delivery; five times longer each time, at most 6 h."""
    webhook_max_tries: int = 8
    """Tries of a delivery before it is given up."""

    mlflow_url: str = ""
    """MLflow tracking server every job's telemetry is carried to; empty = none."""
    mlflow_experiment: str = "grpo"
    """Experiment the runs are in; made when there is none."""
    mlflow_token: str = ""
    """Bearer token for it; empty = none."""

    otel_endpoint: str = ""
    """OpenTelemetry collector that is sent spans and metrics over OTLP/HTTP, for example http://collector:4318; empty = none."""
    otel_headers: tuple[str, ...] = ()
    """Headers for it, `name=value` each."""
    otel_interval_s: float = 10.0
    """How often metrics are sent to it."""
    otel_reads: float = 0.1
    """Share of the requests that only read that get a span, from 0 to 1. Those that change something, or bring a `traceparent`, do."""

    queues: tuple[str, ...] = ("auto",)
    """Celery queues this worker serves; `auto` = grpo-cpu, and grpo-gpu where an NVIDIA GPU is there."""
    worker_id: str = ""
    """Name of this worker in heartbeats and claims; empty = host name and process id."""
    slots: int = 1
    """Jobs this worker runs at once."""

    rank_hosts: int = 1
    """Hosts over which this worker's jobs of several processes run, as many processes on each; the operator starts those of the others."""
    rank_address: str = ""
    """`host:port` of this host at which the processes of such a job meet; needed with several hosts."""
    rank_interface: str = ""
    """Network interface, or an address of it, over which they talk on the CPU; needed with several hosts."""

    deaf_after_s: float = 120.0
    """An idle worker that takes nothing from a queue that is not empty for this long starts itself anew."""

    probe_timeout_s: float = 120.0
    """Longest a probe (`validate?probe=true`) runs on a worker."""
    probe_wait_s: float = 5.0
    """Longest a probe waits for a free slot of a worker."""

    poll_s: float = 0.5
    """How often the dispatcher looks round, and the supervisor looks at its engine."""
    heartbeat_s: float = 10.0
    """How often a supervisor renews its lease and a worker its heartbeat."""
    lease_ttl_s: float = 60.0
    """A lease not renewed for this long is gone."""
    lost_after_s: float = 300.0
    """A running job whose lease has been gone this long is given to another worker."""
    stalled_after_s: float = 600.0
    """A running job whose engine has said nothing for this long is called stalled; nothing else happens to it."""
    republish_after_s: float = 60.0
    """A dispatched job nobody claimed, and whose message is in no queue, is published again after this time."""
    cancel_grace_s: float = 8.0
    """From SIGTERM to SIGKILL when a job is cancelled."""
    drain_grace_s: float = 120.0
    """From the graceful stop command to SIGTERM when a worker drains. A pause has no limit: a step takes its time."""
    retry_backoff_s: float = 1.0
    """Delay before the second attempt after a crash; doubles with each crash, at most 300 s."""
    file_check_s: float = 5.0
    """How often the dispatcher compares events.jsonl of a running attempt with what the stream brought."""

    max_crashes: int = 3
    """Crashes a job survives; one more fails it."""
    max_worker_losses: int = 10
    """Lost workers a job survives; one more fails it."""
    max_stuck_attempts: int = 3
    """Attempts in a row that end at the same step before the job is failed as poison."""

    redis_timeout_s: float = 5.0
    """Longest wait for one answer of Redis."""
    redis_connect_timeout_s: float = 2.0
    stream_maxlen: int = 10_000
    """Events kept per job in its Redis stream (approximately); older ones come from the database."""
    stream_ttl_s: float = 7 * 86400.0
    """A job's Redis keys vanish this long after they were last touched."""
    database_timeout_s: float = 30.0
    """Longest wait for the database's write lock."""

    body_limit_bytes: int = 1_000_000
    file_limit_bytes: int = 2**30
    min_free_bytes: int = 256 * 2**20
    """Below this much free disk no job and no file is accepted."""
    rate_limit_per_minute: int = 6000
    """Requests a minute one API key may send, in bursts of up to as many; 0 = no limit. A server without keys has none."""
    refused_limit_per_minute: int = 600
    """Requests with a wrong key a minute from one client address before they are told to wait; 0 = no limit."""
    sse_per_key: int = 8
    sse_total: int = 200
    log_level: str = "INFO"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Settings from the environment (`os.environ` unless given); `overrides` win. Raises SettingsError."""
        source = os.environ if environ is None else environ
        hints = get_type_hints(cls)
        names = {f"GRPO_{field.name.upper()}": field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, alias in (("database_url", "DATABASE_URL"), ("redis_url", "REDIS_URL")):
            if source.get(alias):
                values[name] = source[alias]
        for variable, text in source.items():
            if not variable.startswith("GRPO_") or variable in FOREIGN_VARIABLES:
                continue
            if variable not in names:
                near = nearest(variable, names, prefix="GRPO_")
                raise SettingsError(f"{variable} is no setting; " + (f"did you mean {near}?" if near else "unset it"))
            values[names[variable]] = _parse(variable, text, hints[names[variable]])
        values.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**values).resolved()

    def resolved(self) -> Settings:
        """The same with absolute paths and full URLs, checked. Raises SettingsError."""
        data_dir = Path(self.data_dir).expanduser().absolute()
        if "?" in str(data_dir) and not self.database_url:
            raise SettingsError(f"the data directory {data_dir} holds a '?', which begins the options of a database URL; choose another")
        url = self.database_url or f"sqlite:///{data_dir / 'grpo.db'}"
        for prefix in ("postgres://", "postgresql://"):
            if url.startswith(prefix):
                url = "postgresql+psycopg://" + url.removeprefix(prefix)
        model_dir = None if self.model_dir is None else Path(self.model_dir).expanduser().absolute()
        settings = dataclasses.replace(self, data_dir=data_dir, database_url=url, model_dir=model_dir)
        settings._check()
        return settings

    def _check(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and value <= 0:
                raise SettingsError(f"GRPO_{field.name.upper()} is {value}; give a time above 0 seconds")
        if self.heartbeat_s * 2 > self.lease_ttl_s:
            raise SettingsError("GRPO_LEASE_TTL_S must be at least twice GRPO_HEARTBEAT_S, or one late heartbeat loses the lease")
        if self.lost_after_s < self.lease_ttl_s:
            raise SettingsError("GRPO_LOST_AFTER_S must be at least GRPO_LEASE_TTL_S: a job cannot be lost before its lease is gone")
        if not self.queues or self.slots < 1:
            raise SettingsError("GRPO_QUEUES needs at least one queue and GRPO_SLOTS at least 1")
        if not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise SettingsError("REDIS_URL must begin with redis://, rediss:// or unix://")
        if not self.database_url.startswith(("sqlite://", "postgresql+psycopg://")):
            raise SettingsError("DATABASE_URL must begin with sqlite:// or postgresql://")
        if self.rate_limit_per_minute < 0 or self.refused_limit_per_minute < 0:
            raise SettingsError("GRPO_RATE_LIMIT_PER_MINUTE and GRPO_REFUSED_LIMIT_PER_MINUTE must be 0 (no limit) or more")
        if self.mlflow_url and not self.mlflow_url.startswith(("http://", "https://")):
            raise SettingsError("GRPO_MLFLOW_URL must begin with http:// or https://")
        if self.otel_endpoint and not self.otel_endpoint.startswith(("http://", "https://")):
            raise SettingsError("GRPO_OTEL_ENDPOINT must begin with http:// or https://")
        if any("=" not in header for header in self.otel_headers):
            raise SettingsError("GRPO_OTEL_HEADERS must be name=value, with commas between several")
        if not 0 <= self.otel_reads <= 1:
            raise SettingsError(f"GRPO_OTEL_READS is {self.otel_reads}; give a share from 0 to 1")
        if self.remote_grader_hosts and self.remote_grader_secret_file is None:
            raise SettingsError("GRPO_REMOTE_GRADER_HOSTS needs GRPO_REMOTE_GRADER_SECRET_FILE, the file of secrets that sign the requests")
        if self.rank_hosts < 1 or (self.rank_hosts > 1) != bool(self.rank_address and self.rank_interface):
            raise SettingsError("GRPO_RANK_HOSTS of 2 and more, GRPO_RANK_ADDRESS and GRPO_RANK_INTERFACE belong together: set all or none")
        if self.rank_address and not self.rank_address.rpartition(":")[2].isdigit():
            raise SettingsError(f"GRPO_RANK_ADDRESS is {self.rank_address!r}; give host:port")
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"GRPO_PORT is {self.port}; give a port from 0 to 65535")

    def remote_graders(self) -> dict[str, Any] | None:
        """What remote graders may do, as contract.grader.RemotePolicy has it; None = none may be called."""
        if not self.remote_grader_hosts:
            return None
        secret_file, hosts = str(self.remote_grader_secret_file), list(self.remote_grader_hosts)
        return {"hosts": hosts, "secret_file": secret_file, "allow_private": self.remote_grader_allow_private}

    def ranks_over_hosts(self) -> dict[str, Any] | None:
        """How the processes of a job meet over several hosts, as contract.command.Hosts has it; None = all run on this host."""
        if self.rank_hosts == 1:
            return None
        return {"count": self.rank_hosts, "address": self.rank_address, "interface": self.rank_interface}

    def to_env(self) -> dict[str, str]:
        """The variables that make `from_env` return these settings, for child processes."""
        env: dict[str, str] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or value == field.default:
                continue
            env[f"GRPO_{field.name.upper()}"] = ",".join(value) if isinstance(value, tuple) else str(value)
        return env


def is_redis_given() -> bool:
    """Whether somebody named a Redis, so that none needs to be started."""
    return bool(os.environ.get("REDIS_URL") or os.environ.get("GRPO_REDIS_URL"))


def bare_environment() -> dict[str, str]:
    """This process's environment without our settings and URLs: what an engine may see, and what a child's settings are added to."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GRPO_") and name not in ("REDIS_URL", "DATABASE_URL")}


def _parse(variable: str, text: str, hint: Any) -> Any:
    try:
        if hint is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.strip().lower()]
        if hint is int:
            return int(text)
        if hint is float:
            return float(text)
        if hint == tuple[str, ...]:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if hint in (Path, Path | None):
            return Path(text) if text else None
        return text
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[hint]
        raise SettingsError(f"{variable} is {text!r}; give {kind}") from None
