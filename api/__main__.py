"""`python -m api`: the API alone, on the host and port of the settings."""

from __future__ import annotations

import sys

import uvicorn

from api.app import create_app
from api.protocol import HeadDeadline
from grpo_engine.contract.error import GrpoError
from jobs.settings import Settings, SettingsError


def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Open event streams get 5 s to end. Raises GrpoError when the bind would be unsafe."""
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level.lower(),
        http=HeadDeadline,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
        limit_concurrency=1000,
        server_header=False,
        access_log=False,
        ws="none",
    )


def main() -> int:
    """Exit code 2 when the settings cannot be used."""
    try:
        serve(Settings.from_env())
    except (SettingsError, GrpoError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
