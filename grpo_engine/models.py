"""From a model's name to a folder of safetensors that is safe to load.

A name is `smollm2-135m-instruct`, a local folder, or a Hub id. Code from a model repository is never run, pickled
weights are never read, and quantised weights cannot be trained: each is refused with its reason. Tokens for gated
repositories are read by huggingface_hub itself (HF_TOKEN).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from grpo_engine.contract.error import InsufficientStorage, InvalidRequest, Unavailable
from grpo_engine.gguf_model import SMOLLM2, OnProgress, bundled_folder

WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja", "tokenizer.model", "*.tiktoken"]
"""Files fetched from the Hub: weights, configuration, tokenizer, chat template."""

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def model_folder(name: str, cache_dir: Path, model_dir: Path | None, on_progress: OnProgress) -> Path:
    """The local folder that holds the named model, fetched or converted when needed, and checked by `check_folder`."""
    if name == SMOLLM2:
        return bundled_folder(cache_dir, on_progress)
    folder = _local_folder(name, model_dir)
    if folder is None:
        folder = _from_hub(name, cache_dir / "hub", on_progress)
    check_folder(folder)
    return folder


def _local_folder(name: str, model_dir: Path | None) -> Path | None:
    """The folder a name points to, or None when it is to be looked up on the Hub."""
    looks_like_path = Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if model_dir is None:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder.resolve()
        if looks_like_path:
            raise InvalidRequest(f"there is no model folder {name}; give an existing folder, a Hub id, or {SMOLLM2}", param="model")
        return None
    root = model_dir.resolve()
    folder = (root / name).resolve()
    if not folder.is_relative_to(root) or folder == root:
        raise InvalidRequest("local models must lie below the server's model directory; name them relative to it", param="model")
    if folder.is_dir():
        return folder
    if looks_like_path:
        raise InvalidRequest(f"there is no folder {name} below the server's model directory", param="model")
    return None


def check_folder(folder: Path) -> None:
    """Refuse what must not or cannot be loaded: foreign code, pickles, quantised weights, no weights."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise InvalidRequest(f"the model folder {folder.name} has no config.json", param="model")
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if "adapter_config.json" in names:
        raise InvalidRequest(
            f"{folder.name} holds an adapter beside its weights, which would be loaded on top of them; merge it first "
            "(peft: merge_and_unload, save_pretrained) and name the merged folder",
            param="model",
        )
    _refuse_files(folder.name, names)
    for path in (config_path, folder / "tokenizer_config.json"):
        if path.is_file():
            _refuse_config(folder.name, path.name, json.loads(path.read_text(encoding="utf-8")))


def _refuse_files(name: str, files: Iterable[str]) -> None:
    files = list(files)
    if any(file.endswith(".safetensors") for file in files):
        return
    pickles = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise InvalidRequest(
            f"{name} has only pickled weights ({pickles[0]}), which can run code when loaded; convert them to safetensors", param="model"
        )
    raise InvalidRequest(f"{name} has no .safetensors weights", param="model")


def _refuse_config(name: str, file: str, config: dict[str, Any]) -> None:
    if config.get("auto_map"):
        raise InvalidRequest(f"{name} needs code from its own repository (auto_map in {file}), which is never run here", param="model")
    if config.get("quantization_config"):
        raise InvalidRequest(f"{name} is quantised, and quantised weights cannot be trained; use the original model", param="model")


def _from_hub(name: str, cache_dir: Path, on_progress: OnProgress) -> Path:
    if not _HUB_ID.match(name):
        raise InvalidRequest(f"{name} is neither a model folder, nor a Hub id, nor {SMOLLM2}", param="model")
    try:
        total = _check_remote(name, cache_dir)
    except (OfflineModeIsEnabled, Unavailable) as error:
        return _already_fetched(name, cache_dir, error)
    bar = _progress_bar(total, on_progress, name)
    try:
        return Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=WANTED, tqdm_class=bar))
    except (HfHubHTTPError, OSError) as error:
        raise Unavailable(f"fetching {name} from the Hub failed: {error}", param="model") from error


def _already_fetched(name: str, cache_dir: Path, why: Exception) -> Path:
    try:
        return Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=WANTED, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise Unavailable(f"{name} is not in the cache and the Hub cannot be reached ({why}); try {SMOLLM2} or a local folder") from error


def _check_remote(name: str, cache_dir: Path) -> int:
    """Look before downloading; returns the bytes to fetch."""
    try:
        info = HfApi().model_info(name, files_metadata=True)
    except GatedRepoError as error:
        raise InvalidRequest(f"{name} is gated: accept its terms on the Hub and set HF_TOKEN on the worker", param="model") from error
    except RepositoryNotFoundError as error:
        raise InvalidRequest(
            f"the Hub knows no model {name}, or it is private: check the name, or set HF_TOKEN on the worker", param="model"
        ) from error
    except OfflineModeIsEnabled:
        raise
    except (HfHubHTTPError, OSError) as error:
        raise Unavailable(f"the Hub does not answer: {error}", param="model") from error
    siblings = info.siblings or []
    _refuse_files(name, [file.rfilename for file in siblings])
    _refuse_config(name, "config.json", info.config or {})
    total = sum(file.size or 0 for file in siblings if file.rfilename.endswith((".safetensors", ".json", ".model")))
    cache_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir).free
    if total > free:
        raise InsufficientStorage(f"{name} needs {total:,} bytes and {free:,} are free in the model cache", param="model")
    return total


def _progress_bar(total: int, on_progress: OnProgress, name: str) -> type[tqdm]:
    """A tqdm class that counts bytes for us and prints nothing."""
    done = 0

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal done
            if self._counts_bytes and n:
                done += int(n)
                on_progress(min(done, total), total, f"fetching {name}")
            shown: bool | None = super().update(n)
            return shown

    return Bar
