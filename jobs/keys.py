"""Every Redis key, what it holds and how long it lives. Nothing else in the project spells a key.

All of it is rebuildable: the database and the job directories are the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "grpo:"
"""Also Celery's `global_keyprefix`, so one ACL pattern covers all."""

DAY_S = 86400


@dataclass(frozen=True)
class Key:
    """One family of keys."""

    pattern: str
    ttl: str
    """Seconds, or the setting that holds them. Every write renews it."""
    holds: str


KEYS: tuple[Key, ...] = (
    Key("grpo:generation", "30 days", "UUID; the database has a copy, and a mismatch means that Redis was wiped"),
    Key("grpo:job:<id>:events", "stream_ttl_s", "stream of engine events, id <epoch>-<seq>, one field `event`; capped by stream_maxlen"),
    Key(
        "grpo:job:<id>:dispatch:<epoch>",
        "stream_ttl_s",
        "JSON of the attempt: spec, files, resume_from; paths from the job directory",
    ),
    Key("grpo:job:<id>:wanted", "stream_ttl_s", "JSON {epoch, wanted}: the current epoch (older attempts are fenced) and what it shall do"),
    Key("grpo:job:<id>:commands", "stream_ttl_s", "hash number -> JSON command, re-sent until answered"),
    Key("grpo:job:<id>:lease", "lease_ttl_s", "JSON {worker, epoch}: somebody looks after the attempt"),
    Key("grpo:probe:<id>", "600 s", "JSON order of a probe: spec, paths, time limit; gone when a worker takes it"),
    Key("grpo:probe:<id>:asker", "lease_ttl_s", "1: somebody waits for the probe's answer"),
    Key("grpo:probe:<id>:runner", "lease_ttl_s", "id of the worker that works on the probe"),
    Key("grpo:probe:<id>:answer", "60 s", "JSON answer of a probe: what was found, or why there is nothing"),
    Key("grpo:worker:<id>", "lease_ttl_s", "JSON heartbeat of a worker"),
    Key("grpo:dispatcher", "lease_ttl_s", "JSON {pid, host, time}: a dispatcher turns"),
    Key("grpo:rate:<who>:<minute>", "3 minutes", "requests of an API key, or refused ones of an address, let through in a minute"),
    Key("grpo:ping", "1 day", "written to learn whether Redis takes writes"),
    Key("grpo:workers", "1 day", "set of worker ids seen lately"),
    Key("grpo:notices", "1 day", "list of JSON: what workers have to say for a job's history; the dispatcher takes it; capped"),
)

GENERATION = "grpo:generation"
PING = "grpo:ping"
DISPATCHER = "grpo:dispatcher"
GENERATION_TTL_S = 30 * DAY_S
WORKERS = "grpo:workers"
WORKERS_TTL_S = DAY_S
RATE_TTL_S = 180
NOTICES = "grpo:notices"
MAX_NOTICES = 1000


def events(job_id: str) -> str:
    """The job's event stream."""
    return f"{PREFIX}job:{job_id}:events"


def dispatch(job_id: str, epoch: int) -> str:
    """What an attempt needs to start."""
    return f"{PREFIX}job:{job_id}:dispatch:{epoch}"


def wanted(job_id: str) -> str:
    """What the job's attempt shall do."""
    return f"{PREFIX}job:{job_id}:wanted"


def commands(job_id: str) -> str:
    """Commands the engine has not answered."""
    return f"{PREFIX}job:{job_id}:commands"


def lease(job_id: str) -> str:
    """Who looks after the job."""
    return f"{PREFIX}job:{job_id}:lease"


def worker(worker_id: str) -> str:
    """A worker's heartbeat."""
    return f"{PREFIX}worker:{worker_id}"


def probe(probe_id: str) -> str:
    """A probe's order."""
    return f"{PREFIX}probe:{probe_id}"


def probe_asker(probe_id: str) -> str:
    """Somebody waits for the probe."""
    return f"{PREFIX}probe:{probe_id}:asker"


def probe_runner(probe_id: str) -> str:
    """Somebody works on the probe."""
    return f"{PREFIX}probe:{probe_id}:runner"


def probe_answer(probe_id: str) -> str:
    """What the probe found."""
    return f"{PREFIX}probe:{probe_id}:answer"


def rate(who: str, minute: int) -> str:
    """Requests let through for a key or an address in a minute since 1970."""
    return f"{PREFIX}rate:{who}:{minute}"
