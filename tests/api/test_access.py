"""Who gets in: every route is closed unless listed, scopes hold, and a server without keys serves this machine only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from typer.testing import CliRunner

from api import keys
from api.app import create_app
from api.auth import PUBLIC_PATHS, scope_of
from api.sse import StreamLimits
from grpo_engine.contract.error import InvalidRequest
from jobs.settings import Settings
from tests.api.conftest import Server, create, spec

JOBS = "/v1/fine_tuning/jobs"
SETTINGS_KEY = "a-key-of-the-operator"


@dataclass(frozen=True)
class Door:
    """A method and a path that exists."""

    method: str
    path: str
    scope: str

    @property
    def is_public(self) -> bool:
        return self.path in PUBLIC_PATHS or self.path == "/static/{name}"

    @property
    def url(self) -> str:
        return self.path.replace("{job_id}", "ftjob-1").replace("{checkpoint_id}", "ftckpt-1").replace("{file_id}", "file-1").replace(
            "{key}", "k"
        ).replace("{model:path}", "tiny").replace("{sweep_id}", "ftsweep-1")  # fmt: skip


def doors(app: FastAPI) -> list[Door]:
    """Every operation, with included routers opened up. Fails on a route of a kind this test does not know."""
    found: list[Door] = []
    open_routes = list(app.routes)
    while open_routes:
        route = open_routes.pop()
        inner = getattr(route, "original_router", None)
        if isinstance(route, APIRoute):
            found += [Door(method, route.path, scope_of(route.endpoint)) for method in route.methods]
        elif inner is not None:
            open_routes += inner.routes
        else:
            raise AssertionError(f"a route of an unknown kind: {route}")
    return found


@pytest.fixture
def locked(api_settings: Settings, limits: StreamLimits) -> Iterator[Server]:
    running = Server(replace(api_settings, api_key=SETTINGS_KEY), limits)
    yield running
    running.stop()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_but_the_public_ones_answers_401_without_a_key(locked: Server) -> None:
    closed = [door for door in doors(locked.app) if not door.is_public]
    assert len(closed) > 25
    with locked.client() as client:
        for door in closed:
            for headers in ({}, bearer("wrong"), bearer("grpo_" + "0" * 16 + "_" + "x" * 43), {"authorization": "Basic abc"}):
                answer = client.request(door.method, door.url, headers=headers)
                assert answer.status_code == 401, door
                assert answer.headers["www-authenticate"] == "Bearer"
                assert door.method == "HEAD" or answer.json()["error"]["code"] == "invalid_api_key"
        for path in PUBLIC_PATHS:
            assert client.get(path).status_code in (200, 503), path


def test_every_route_answers_403_out_of_scope_and_lets_its_scope_in(locked: Server) -> None:
    ledger = locked.app.state.services.ledger
    keys = {scope: ledger.create_api_key(name=scope, scopes=[scope])[1] for scope in ("read", "submit", "control", "admin")}
    with locked.client() as client:
        for door in doors(locked.app):
            if door.is_public:
                continue
            for scope, key in keys.items():
                with client.stream(door.method, door.url, headers=bearer(key)) as answer:
                    is_open = scope in (door.scope, "admin")
                    assert (answer.status_code == 403) is not is_open, (door, scope)
                    assert answer.status_code != 401


def test_reading_routes_need_read_and_changing_ones_do_not_open_to_it(locked: Server) -> None:
    for door in doors(locked.app):
        if not door.is_public:
            assert (door.scope == "read") is (door.method in ("GET", "HEAD")), door


def test_a_revoked_and_an_expired_key_open_nothing(locked: Server) -> None:
    ledger = locked.app.state.services.ledger
    record, key = ledger.create_api_key(name="ci", scopes=["read"])
    _, old = ledger.create_api_key(name="old", scopes=["read"], expires_at=1.0)
    with locked.client() as client:
        assert client.get(JOBS, headers=bearer(key)).status_code == 200
        ledger.revoke_api_key(record.id)
        assert client.get(JOBS, headers=bearer(key)).status_code == 401
        assert client.get(JOBS, headers=bearer(old)).status_code == 401
        assert client.get(JOBS, headers=bearer(SETTINGS_KEY)).status_code == 200


def test_keys_do_not_share_idempotency_keys(locked: Server) -> None:
    ledger = locked.app.state.services.ledger
    one, two = (ledger.create_api_key(name=name, scopes=["admin"])[1] for name in "ab")
    ids = set()
    with locked.client(headers=bearer(SETTINGS_KEY)) as client:
        body = client.get(f"{JOBS}/{create(client)}").json()
        same = spec(body["training_file"])
        for key in (one, two, one):
            ids.add(client.post(JOBS, json=same, headers={**bearer(key), "idempotency-key": "k"}).json()["id"])
    assert len(ids) == 2


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.7", "0.0.0.0", "[::ffff:10.0.0.7]", ""]
)
def test_without_keys_a_foreign_host_is_refused(client: httpx.Client, host: str) -> None:
    answer = client.get(JOBS, headers={"host": host})
    assert answer.status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "localhost:9", "[::1]:8000", "127.8.9.1"])
def test_without_keys_loopback_names_are_served(client: httpx.Client, host: str) -> None:
    assert client.get(JOBS, headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1:1", "null", "file://"])
def test_without_keys_a_foreign_origin_is_refused(client: httpx.Client, origin: str) -> None:
    answer = client.post(f"{JOBS}/ftjob-1/cancel", headers={"origin": origin})
    assert answer.status_code == 403


def test_without_keys_the_servers_own_page_is_served(server: Server, client: httpx.Client) -> None:
    assert client.get(JOBS, headers={"origin": server.url}).status_code == 200


def test_a_server_without_keys_refuses_to_listen_beyond_this_machine(api_settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match="without an API key"):
        create_app(replace(api_settings, host="0.0.0.0"))
    create_app(replace(api_settings, host="0.0.0.0", api_key=SETTINGS_KEY))


def test_the_page_and_its_files_are_public_and_confined(locked: Server) -> None:
    with locked.client() as client:
        page = client.get("/")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert client.get("/static/app.js").status_code == 200
        for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"):
            assert client.get(path).status_code == 404


def test_keys_are_made_listed_and_revoked_from_the_command_line(api_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = CliRunner().invoke
    where = ["--data-dir", str(api_settings.data_dir)]
    made = run(keys.app, ["create", "ci", "--scope", "read", "--json", *where])
    assert made.exit_code == 0, made.output
    key = json.loads(made.stdout)
    assert key["key"].startswith(f"grpo_{key['id']}_")
    assert key["id"] in run(keys.app, ["list", *where]).stdout
    assert key["key"] not in run(keys.app, ["list", *where]).stdout
    assert run(keys.app, ["revoke", key["id"], *where]).exit_code == 0
    assert "revoked" in run(keys.app, ["list", *where]).stdout
    assert run(keys.app, ["revoke", "none", *where]).exit_code == 1
    assert run(keys.app, ["create", "ci", "--scope", "everything", *where]).exit_code == 1
