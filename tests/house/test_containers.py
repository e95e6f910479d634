"""The container files, as far as they can be checked without an engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from api.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ("api", "dispatcher", "worker", "worker-gpu")


def test_every_part_of_the_product_is_a_service() -> None:
    assert set(SERVICES) == {"redis", "postgres", *OURS}


@pytest.mark.parametrize("name", OURS)
def test_each_service_runs_a_command_the_cli_knows(name: str) -> None:
    command = SERVICES[name]["command"][0]
    answer = CliRunner().invoke(app, [command, "--help"])
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize("name", OURS)
def test_services_share_the_artifacts_and_reap_children(name: str) -> None:
    assert "artifacts:/data" in SERVICES[name]["volumes"]
    assert SERVICES[name]["init"] is True
    assert SERVICES[name]["environment"]["GRPO_DATA_DIR"] == "/data"


def test_only_the_gpu_worker_reserves_a_device_and_only_by_profile() -> None:
    reserved = [name for name, service in SERVICES.items() if "deploy" in service]
    assert reserved == ["worker-gpu"]
    assert SERVICES["worker-gpu"]["profiles"] == ["gpu"]
    device = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"][0]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_workers_get_no_database() -> None:
    assert all("DATABASE_URL" not in SERVICES[name]["environment"] for name in ("worker", "worker-gpu"))


def test_nothing_is_published_beyond_loopback() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8000:8000"]


def test_environment_names_are_settings() -> None:
    known = (ROOT / "jobs" / "settings.py").read_text()
    names = {name for service in OURS for name in SERVICES[service]["environment"]}
    fields = {match.lower() for match in re.findall(r"^\s+(\w+):", known, re.MULTILINE)}
    unknown = {name for name in names if name.removeprefix("GRPO_").lower() not in fields}
    assert unknown == set()


def test_images_do_not_run_as_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert all(re.findall(r"^USER (\w+)", stage, re.MULTILINE)[-1] == "grpo" for stage in stages)


def test_dockerfile_copies_what_exists() -> None:
    for sources in re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
