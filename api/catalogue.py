"""Which base models a job may name, and how much disk a run of one needs. Reads config.json and file sizes, never weights.

A name is `smollm2-135m-instruct` (needs no network), a folder below the server's model directory, or a Hub id
`organisation/name`, whose existence only the worker can find out.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_engine.contract.error import InsufficientStorage, InvalidRequest
from grpo_engine.contract.job import JobSpec

BUILTIN = "smollm2-135m-instruct"
_BUILTIN_PARAMETERS, _BUILTIN_WIDTH = 134_515_008, 576
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
_RESUME_BYTES = 12
"""Bytes a parameter takes in a resume state: fp32 weights and AdamW's two moments."""
_PUBLISHED_BYTES = 4
"""Bytes a parameter takes in published weights, at most."""


@dataclass(frozen=True)
class BaseModel:
    """A model a job may start from."""

    name: str
    kind: Literal["builtin", "local", "hub", "checkpoint"]
    num_parameters: int | None
    """null until the worker has fetched it."""
    created: int = 0
    width: int | None = None
    """Size of the hidden states; null when config.json does not say."""


def find_model(name: str, model_dir: Path | None, *, allow_hub: bool = True) -> BaseModel:
    """The model of that name. Raises InvalidRequest (`param` = model) when no job could load it."""
    if name == BUILTIN:
        return BaseModel(BUILTIN, "builtin", _BUILTIN_PARAMETERS, width=_BUILTIN_WIDTH)
    folder = _local_folder(name, model_dir)
    if folder is not None:
        parameters, width = _check_folder(name, folder)
        return BaseModel(name, "local", parameters, int(folder.stat().st_mtime), width)
    if _HUB_ID.fullmatch(name) and allow_hub:
        return BaseModel(name, "hub", None)
    ways = [f"{BUILTIN!r}", "a folder below the server's model directory (GRPO_MODEL_DIR)"]
    if allow_hub:
        ways.append("a Hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct'")
    raise InvalidRequest(f"model {name!r} is not known; use {' or '.join([', '.join(ways[:-1]), ways[-1]])}", param="model")


def checkpoint_model(checkpoint_id: str, folder: Path) -> BaseModel:
    """A published checkpoint as the beginning of a job. Raises InvalidRequest when no job could load it."""
    parameters, width = _check_folder(checkpoint_id, folder)
    return BaseModel(checkpoint_id, "checkpoint", parameters, int(folder.stat().st_mtime), width)


def local_models(model_dir: Path | None) -> list[BaseModel]:
    """The folders below `model_dir` that hold a model, one or two levels deep (`name` or `organisation/name`)."""
    found: list[BaseModel] = []
    if model_dir is None or not model_dir.is_dir():
        return found
    for config in sorted([*model_dir.glob("*/config.json"), *model_dir.glob("*/*/config.json")]):
        name = str(config.parent.relative_to(model_dir))
        try:
            found.append(find_model(name, model_dir))
        except InvalidRequest:
            continue  # a folder no job could load is no model
    return found


def disk_needed(spec: JobSpec, model: BaseModel) -> int | None:
    """Bytes the job's checkpoints take at most: two resume states while one replaces the other, and the published weights kept.

    With an adapter a resume state holds the adapter alone, and published weights are the merged model with the adapter beside it.
    """
    if model.num_parameters is None:
        return None
    published, lora = spec.method.grpo.checkpoints.keep + 1, spec.method.grpo.adapter
    trained = model.num_parameters if lora is None else _adapter_parameters(model.num_parameters, model.width, lora.rank)
    beside = 0 if lora is None else trained
    return 2 * trained * _RESUME_BYTES + published * (model.num_parameters + beside) * _PUBLISHED_BYTES


def _adapter_parameters(parameters: int, width: int | None, rank: int) -> int:
    """At most so many numbers in an adapter of this rank on all linear layers.

    An n x m layer gets rank (n + m) numbers: its own size times rank (1/n + 1/m), which is 2 rank / width, and less for wide
    layers. Without a known width: as many as the model has.
    """
    return parameters if width is None else -(-parameters * 2 * rank // width)


def require_disk(spec: JobSpec, model: BaseModel, free: int, reserve: int) -> int | None:
    """`disk_needed`; raises InsufficientStorage (507) when the data directory's disk does not have it."""
    needed = disk_needed(spec, model)
    if free < (needed or 0) + reserve:
        raise InsufficientStorage(
            f"the job needs about {(needed or 0) / 1e9:.1f} GB for checkpoints beside a reserve of {reserve / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; free space, or lower method.grpo.checkpoints.keep",
            param="method.grpo.checkpoints.keep",
        )
    return needed


def _local_folder(name: str, model_dir: Path | None) -> Path | None:
    """The folder, if the name leads to one strictly below the model directory, and goes straight there."""
    if model_dir is None or "\0" in name or len(name) > 512 or not {"", ".", ".."}.isdisjoint(name.split("/")):
        return None
    root = Path(os.path.realpath(model_dir))
    folder = Path(os.path.realpath(root / name))
    return folder if root in folder.parents and os.path.isdir(folder) else None


def _check_folder(name: str, folder: Path) -> tuple[int, int | None]:
    """Number of parameters by file size, and the size of the hidden states."""
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"model {name!r} has no readable config.json; repair the folder", param="model") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InvalidRequest(f"model {name!r}: config.json names no model_type; repair the folder", param="model")
    if config.get("quantization_config"):
        raise InvalidRequest(f"model {name!r} is quantised, and quantised weights cannot be trained; use the original", param="model")
    if "auto_map" in config:
        raise InvalidRequest(f"model {name!r} brings code of its own (auto_map), which is never run; use another", param="model")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise InvalidRequest(f"model {name!r} has no *.safetensors file; only safetensors weights are loaded", param="model")
    if (folder / "adapter_config.json").exists():
        raise InvalidRequest(f"model {name!r} holds an adapter beside its weights; merge it and use the merged folder", param="model")
    bytes_each = _WIDTHS.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    widths = [text[key] for key in ("hidden_size", "n_embd", "d_model") if isinstance(text.get(key), int) and text[key] > 0]
    return sum(path.stat().st_size for path in weights) // bytes_each, widths[0] if widths else None
