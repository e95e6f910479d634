"""The real worker process, told to run the scripted engine."""

from __future__ import annotations

import sys
from pathlib import Path

from worker.__main__ import main

if __name__ == "__main__":
    here = Path(__file__)
    main(
        engine_command=(sys.executable, str(here.with_name("fake_engine.py"))),
        probe_command=(sys.executable, str(here.with_name("fake_probe.py"))),
    )
