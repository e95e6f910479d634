"""The real worker process, told to run the scripted engine."""

from __future__ import annotations

import sys
from pathlib import Path

from worker.__main__ import main

if __name__ == "__main__":
    main(engine_command=(sys.executable, str(Path(__file__).with_name("scripted_engine.py"))))
