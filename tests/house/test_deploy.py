"""The units and manifests of deploy/, held against the code they start."""

from __future__ import annotations

import configparser
import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from api.auth import PUBLIC_PATHS
from api.cli import app
from jobs.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
KUBERNETES = ROOT / "deploy" / "kubernetes"
SETTINGS = {f"GRPO_{field.name.upper()}" for field in dataclasses.fields(Settings)} | {"REDIS_URL", "DATABASE_URL"}
GRACE_S = Settings().drain_grace_s + Settings().cancel_grace_s


def unit(path: Path) -> dict[str, list[str]]:
    """`[Service]` of a unit: every value of each key."""
    found: dict[str, list[str]] = {}
    section = path.read_text().split("[Service]")[1].split("[Install]")[0]
    for line in section.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def pods() -> list[dict[str, Any]]:
    """Every pod template of the manifests."""
    documents = [document for path in sorted(KUBERNETES.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]
    return [document["spec"]["template"] for document in documents if "template" in document.get("spec", {})]


def containers() -> list[dict[str, Any]]:
    return [container for pod in pods() for container in pod["spec"]["containers"] if container["image"].startswith("grpo-")]


def check_command(words: list[str]) -> None:
    """The CLI knows the command and each of its options."""
    answer = CliRunner().invoke(app, [words[0], "--help"])
    assert answer.exit_code == 0, answer.output
    assert all(word in answer.output for word in words[1:] if word.startswith("--"))


@pytest.mark.parametrize("path", SYSTEMD, ids=lambda path: path.name)
def test_a_unit_starts_what_there_is(path: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(path)
    assert set(parser.sections()) == {"Unit", "Service", "Install"}
    service = unit(path)
    (command,) = service["ExecStart"]
    program, *words = command.split()
    assert program == "/opt/grpo/bin/grpo"
    check_command(words)
    names = {line.partition("=")[0] for line in service.get("Environment", [])}
    assert names <= SETTINGS | {"CUDA_VISIBLE_DEVICES"}
    assert service["Restart"] == ["always"]


def test_a_worker_has_time_to_drain_and_its_engine_gets_no_signal() -> None:
    workers = [unit(path) for path in SYSTEMD if "worker" in path.name]
    assert len(workers) == 2
    for service in workers:
        assert float(service["TimeoutStopSec"][0]) > GRACE_S
        assert service["KillMode"] == ["mixed"]
    times = [pod["spec"]["terminationGracePeriodSeconds"] for pod in pods() if "worker" in pod["metadata"]["labels"]["app"]]
    assert len(times) == 2
    assert min(times) > GRACE_S


@pytest.mark.parametrize(
    "path", [ROOT / "deploy" / "systemd" / "grpo.env.example", KUBERNETES / "secret.env.example"], ids=lambda path: path.name
)
def test_example_files_name_settings(path: Path) -> None:
    names = {line.partition("=")[0] for line in path.read_text().splitlines() if line and not line.startswith("#")}
    assert names - {"REDIS_PASSWORD"} <= SETTINGS


def test_containers_start_what_there_is_with_names_that_are_settings() -> None:
    assert sorted(container["args"][0] for container in containers()) == ["api", "dispatcher", "worker", "worker"]
    for container in containers():
        check_command(container["args"])
        assert {entry["name"] for entry in container["env"]} <= SETTINGS
        probes = [container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe") if name in container]
        assert set(probes) <= PUBLIC_PATHS


def test_kubernetes_adds_no_names_of_its_own() -> None:
    """It would inject GRPO_API_PORT for a service `grpo-api`, and a GRPO_ name that is no setting stops the start."""
    assert [pod["spec"].get("enableServiceLinks") for pod in pods()] == [False] * 5


def test_pods_share_the_data_and_are_not_root() -> None:
    user = re.search(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    for pod in pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    for container in containers():
        data = {entry["name"]: entry.get("value") for entry in container["env"]}["GRPO_DATA_DIR"]
        assert data in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    users = {pod["spec"]["securityContext"]["runAsUser"] for pod in pods() if pod["metadata"]["labels"]["app"].startswith("grpo-")}
    assert users == {int(user.group(1))}


def test_workers_get_no_database() -> None:
    workers = [container for container in containers() if container["args"][0] == "worker"]
    assert all("DATABASE_URL" not in {entry["name"] for entry in worker["env"]} for worker in workers)


def test_kustomize_names_every_manifest() -> None:
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert set(listed) == {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the manifests; the other tests read them without it")
def test_the_manifests_render(tmp_path: Path) -> None:
    folder = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    (folder / "secret.env.example").rename(folder / "secret.env")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "grpo-server:0.1.0" in done.stdout
