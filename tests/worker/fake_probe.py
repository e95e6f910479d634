"""A scripted probe engine: `--seconds S RUN_DIR`. The script is `spec.metadata["script"]`: answer, hang, crash, refuse, oom, helper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from grpo_engine.contract.command import Dispatch
from grpo_engine.contract.event import EXIT_CONFIG, EngineEvent, Outcome
from grpo_engine.contract.probe_view import Probe
from tests.worker.fake_engine import HELPER


def main(run_dir: Path) -> int:
    script = Dispatch.model_validate_json((run_dir / "dispatch.json").read_bytes()).spec.metadata.get("script", "answer")
    event = EngineEvent(epoch=1, seq=1, time=time.time(), type="model.loaded", message="loaded")
    (run_dir / "events.jsonl").write_text(event.to_line() + "\n")
    if "helper" in script:
        subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True)
    if "hang" in script:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if "crash" in script:
        print("the last words of a probe", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if "refuse" in script:
        verdict = Outcome(status="failed", reason="config_error", message="no such model", retryable=False, last_step=0, param="model")
        (run_dir / "outcome.json").write_text(verdict.model_dump_json())
        return EXIT_CONFIG
    found = Probe.model_validate(Probe.model_json_schema()["examples"][0])
    (run_dir / "probe.json").write_text(found.model_dump_json())
    verdict = Outcome(status="succeeded", reason="completed", message="probed", retryable=False, last_step=0)
    (run_dir / "outcome.json").write_text(verdict.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[-1])))
