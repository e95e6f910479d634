"""The users in deploy/redis/users.acl: a job runs from end to end with them, and what they shall not do is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast
from urllib.parse import urlsplit

import pytest
import redis

from api.embedded.stack import Stack
from jobs.queue import make_app
from tests.faults.ground import HERE, Ground, add_environment, ground
from tests.stack import wait_for

pytestmark = pytest.mark.faults

FILE = HERE.parents[1] / "deploy" / "redis" / "users.acl"
PASSWORDS = {"server": "CHANGE_ME", "worker": "CHANGE_ME_TOO"}
REFUSED = (
    "FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "CONFIG SET maxmemory 1", "SHUTDOWN", "ACL LIST", "MONITOR",
    "REPLICAOF NO ONE", "BGREWRITEAOF", "CLIENT KILL TYPE normal", "MODULE LIST", "GET other", "SET unprefixed 1", "XADD events * a b",
    "RENAME grpo:generation stolen",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A server whose Redis knows these users. The default one stays for the test."""

    def with_users(stack: Stack) -> None:
        users = [line for line in FILE.read_text().splitlines() if line.startswith("user ") and line != "user default off"]
        assert len(users) == len(PASSWORDS)
        with (stack.settings.data_dir / "valkey" / "valkey.conf").open("a") as file:
            file.write("".join(f"{line}\n" for line in users))
        for part in ("api", "dispatcher", "worker"):
            user = "worker" if part == "worker" else "server"
            add_environment(stack, part, {"GRPO_REDIS_URL": url_of(stack.settings.redis_url, user)})

    with ground(tmp_path_factory.mktemp("users"), prepare=with_users) as server:
        yield server


def url_of(url: str, user: str) -> str:
    return f"redis://{user}:{PASSWORDS[user]}@127.0.0.1:{urlsplit(url).port}/0"


def test_a_job_runs_with_them_and_nothing_is_refused_that_the_parts_do(site: Ground) -> None:
    job_id = site.submit("step_s=0.1", steps=20)
    site.reach(job_id, 3)
    site.client.set_control(job_id, beta=0.1)
    streamed = list(site.client.stream_metrics(job_id))
    assert len(streamed) >= 20
    assert site.end(job_id, "succeeded").epoch == 1
    assert "control.applied" in site.story(job_id)
    hung = site.submit("hang@3")
    site.reach(hung, 2)
    site.client.cancel(hung)
    site.end(hung, "cancelled")
    drained = site.submit("step_s=0.1", steps=20)
    site.reach(drained, 3)
    assert site.leave("worker") == 0
    site.restart("worker")
    assert site.end(drained, "succeeded").preemptions == 1
    with site.redis() as client:
        told = [entry for entry in cast(list[dict[str, str]], client.acl_log()) if entry["username"] in PASSWORDS]
    assert told == [], "Redis has refused something that a part does"
    for part in ("api", "dispatcher", "worker"):
        assert "NOPERM" not in site.log(part)


@pytest.mark.parametrize("user", PASSWORDS)
def test_what_kombu_does_now_and_then_is_allowed(site: Ground, user: str) -> None:
    """Its scripts: the lock of the sweep for unacknowledged messages, and the bindings of queues that expire."""
    app = make_app(site.settings)
    app.conf.broker_url = url_of(site.settings.redis_url, user)
    with app.connection() as connection:
        channel = connection.default_channel
        channel.qos.restore_visible()
        channel.sweep_bindings()
    wait_for(lambda: app.control.inspect(timeout=1.0).ping(), "the worker to answer its remote control", 30)


@pytest.mark.parametrize("user", PASSWORDS)
def test_what_they_shall_not_do_is_refused(site: Ground, user: str) -> None:
    with redis.Redis.from_url(url_of(site.settings.redis_url, user)) as client:
        for command in REFUSED:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())
