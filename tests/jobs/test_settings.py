"""Settings come from one place, and a wrong one is told, not ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.settings import Settings, SettingsError


def test_defaults_and_where_things_lie(tmp_path: Path) -> None:
    settings = Settings.from_env({"GRPO_DATA_DIR": str(tmp_path)})
    assert settings.database_url == f"sqlite:///{tmp_path}/grpo.db"
    assert settings.redis_url == "redis://127.0.0.1:6379/0"
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert Settings.from_env({}).data_dir.is_absolute()


def test_types_aliases_and_overrides() -> None:
    env = {
        "DATABASE_URL": "postgres://u@h/d", "REDIS_URL": "redis://r:1/2", "GRPO_REDIS_URL": "redis://own:1/2", "GRPO_LOST_AFTER_S": "900",
        "GRPO_QUEUES": "grpo-cpu, grpo-gpu", "GRPO_ALLOW_HUB": "false", "GRPO_MODEL_DIR": "/m", "GRPO_JOB_ID": "ftjob-x", "OTHER": "1",
    }  # fmt: skip
    settings = Settings.from_env(env, port=9000, host=None)
    assert settings.database_url == "postgresql+psycopg://u@h/d"
    assert settings.redis_url == "redis://own:1/2"
    assert (settings.lost_after_s, settings.queues, settings.allow_hub) == (900.0, ("grpo-cpu", "grpo-gpu"), False)
    assert (settings.model_dir, settings.port, settings.host) == (Path("/m"), 9000, "127.0.0.1")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"GRPO_LEASE_TTL": "3"}, "GRPO_LEASE_TTL is no setting; did you mean GRPO_LEASE_TTL_S?"),
        ({"GRPO_PORT": "http"}, "GRPO_PORT is 'http'; give a whole number"),
        ({"GRPO_POLL_S": "soon"}, "GRPO_POLL_S is 'soon'; give a number"),
        ({"GRPO_ALLOW_HUB": "maybe"}, "GRPO_ALLOW_HUB is 'maybe'; give true or false"),
        ({"GRPO_POLL_S": "0"}, "GRPO_POLL_S is 0.0; give a time above 0 seconds"),
        ({"GRPO_HEARTBEAT_S": "40"}, "GRPO_LEASE_TTL_S must be at least twice GRPO_HEARTBEAT_S"),
        ({"GRPO_LOST_AFTER_S": "5"}, "GRPO_LOST_AFTER_S must be at least GRPO_LEASE_TTL_S"),
        ({"REDIS_URL": "http://x"}, "REDIS_URL must begin with"),
        ({"GRPO_QUEUES": ""}, "GRPO_QUEUES needs at least one queue"),
        ({"DATABASE_URL": "mysql://x"}, "DATABASE_URL must begin with sqlite:// or postgresql://"),
        ({"DATABASE_URL": "nonsense"}, "DATABASE_URL must begin with sqlite:// or postgresql://"),
        ({"GRPO_PORT": "70000"}, "GRPO_PORT is 70000; give a port from 0 to 65535"),
        ({"GRPO_DATA_DIR": "/tmp/a?b"}, "the data directory /tmp/a?b holds a '?'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(env: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env(env)
    assert str(caught.value).startswith(message)


def test_children_get_the_same_settings(tmp_path: Path) -> None:
    settings = Settings.from_env({"GRPO_DATA_DIR": str(tmp_path), "GRPO_QUEUES": "a,b", "GRPO_ALLOW_HUB": "0", "GRPO_POLL_S": "0.25"})
    assert Settings.from_env(settings.to_env()) == settings
