"""The dashboard's files on the wire."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from api.routes.dashboard import FOLDER, TYPES
from jobs.settings import Settings
from tests.browser.stage import LIMITS
from tests.server import Server

FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
SCRIPTS = [path for path in FILES if path.suffix == ".js"]


def test_every_file_is_served_with_its_type_and_closed_policy(server: Server) -> None:
    with httpx.Client(base_url=server.url) as client:
        for path in FILES:
            answer = client.get(f"/static/{path.name}")
            assert answer.status_code == 200
            assert answer.content == path.read_bytes()
            assert answer.headers["content-type"] == TYPES[path.suffix]
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.search(r"https?:|\*", policy)
        page = client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.content == (FOLDER / "index.html").read_bytes()


def test_a_known_etag_is_answered_without_the_body(server: Server) -> None:
    with httpx.Client(base_url=server.url) as client:
        first = client.get("/static/app.js")
        again = client.get("/static/app.js", headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get("/static/app.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2F..%2Fapp.py", "%2E%2E/app.py", "dashboard.py", ""])
def test_nothing_else_is_served(server: Server, name: str) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert client.get(f"/static/{name}").status_code == 404


def test_the_page_needs_no_key_and_its_data_does(dashboard_settings: Settings) -> None:
    locked = Server(replace(dashboard_settings, api_key="grpo_secret_for_this_test"), LIMITS)
    try:
        with httpx.Client(base_url=locked.url) as client:
            assert client.get("/").status_code == 200
            assert client.get("/static/app.js").status_code == 200
            assert client.get("/v1/fine_tuning/jobs").status_code == 401
    finally:
        locked.stop()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_modules_are_short_say_what_they_are_and_never_write_markup(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 300
    assert text.startswith("/* ")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage|\.cookie", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_every_import_leads_to_a_file() -> None:
    names = {path.name for path in FILES}
    for path in SCRIPTS:
        for target in re.findall(r"""(?:from|import)\s*\(?["']\./([^"']+)["']""", path.read_text()):
            assert target in names, f"{path.name} imports {target}"


def test_what_the_page_of_a_job_is_made_of_is_fetched_at_once() -> None:
    """Modules found only by reading others cost a round trip each, one after the other."""
    found: list[str] = []

    def follow(name: str) -> None:
        if name not in found:
            found.append(name)
            for target in re.findall(r'^import .*?from "\./([^"]+)"', (FOLDER / name).read_text(), re.MULTILINE):
                follow(target)

    follow("app.js")
    follow("job_view.js")
    preloaded = re.findall(r'<link rel="modulepreload" href="/static/([^"]+)">', (FOLDER / "index.html").read_text())
    assert sorted(preloaded) == sorted(set(found) - {"app.js"})
