"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): put into a model, switched off for the reference, merged, saved.

A layer computes W x + (alpha / rank) B A x with W frozen; B starts at 0, so a fresh adapter changes nothing, not even in the
last bit. peft puts its layers into the transformers module in place: the module, its attention function and its head stay the
same objects, and everything that calls the module works as without an adapter. Left out: dropout, biases, adapters on
embeddings or on the output head (the head is applied in tiles, outside the module), and jobs that begin with an adapter.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_engine.attention import Plan
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.job import LoraConfig
from grpo_engine.network import Network

ADAPTER_DIR = "adapter"
"""Folder of the adapter inside a published checkpoint. Beside config.json it would be put onto the merged weights a second time:
transformers loads an adapter that lies there."""

TARGETS = "method.grpo.adapter.target_modules"
_NAME = "default"


@dataclass(frozen=True)
class Adapter:
    """The adapter in a module; its numbers are the module's only trainable parameters. `inject` makes one."""

    layers: tuple[str, ...]
    """Names of the adapted layers, as in the bare model."""
    scale: float
    """alpha / rank."""
    described: dict[str, Any]
    """peft's adapter_config.json."""

    @torch.no_grad()
    def merge_into(self, base: PreTrainedModel, trained: Mapping[str, Tensor]) -> None:
        """Add the adapter to the fp32 weights of `base`, freshly read from where the frozen ones among `trained` came from.

        Raises OSError when they are not the weights the adapter was trained on.
        """
        weights = dict(base.named_parameters())
        for name, frozen in trained.items():
            if ".lora_" in name:
                continue
            plain = name.replace(".base_layer.", ".")
            if plain not in weights or not torch.equal(weights[plain].to(frozen.dtype), frozen.detach().cpu()):
                raise OSError(f"{plain} of the base model is not what it was when the run began")
        for layer in self.layers:
            down_RI, up_OR = (trained[f"{layer}.lora_{side}.{_NAME}.weight"].detach().cpu() for side in "AB")
            delta_OI = (up_OR @ down_RI) * self.scale
            is_transposed = isinstance(base.get_submodule(layer), Conv1D)
            weights[f"{layer}.weight"].add_(delta_OI.t() if is_transposed else delta_OI)

    def save(self, folder: Path, masters: Mapping[str, Tensor]) -> None:
        """Write the two files that `peft.PeftModel.from_pretrained(base, folder)` reads."""
        folder.mkdir()
        tensors = {
            f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": master.detach().cpu().contiguous() for name, master in masters.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(self.described, indent=2, sort_keys=True), encoding="utf-8")


def inject(module: PreTrainedModel, cfg: LoraConfig, *, seed: int, base_name: str) -> Adapter:
    """Put a fresh adapter into the module and freeze everything else. `base_name` is what adapter_config.json calls the base.

    Raises InvalidRequest for target modules the model does not have or that cannot carry an adapter.
    """
    targets = _targets(module, cfg.target_modules)
    config = peft.LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
        fan_in_fan_out=any(isinstance(part, Conv1D) for part in module.modules()),
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set")  # a model with both kinds of layers; peft sees to each
            peft.inject_adapter_in_model(config, module, _NAME)
    except ValueError as error:
        raise InvalidRequest(f"this model cannot carry an adapter on {', '.join(targets)}: {error}", param=TARGETS) from error
    layers = {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}
    generator = torch.Generator().manual_seed(seed)
    for part in layers.values():
        nn.init.kaiming_uniform_(part.lora_A[_NAME].weight, a=math.sqrt(5), generator=generator)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return Adapter(tuple(layers), cfg.alpha / cfg.rank, _described(config))


def _described(config: Any) -> dict[str, Any]:
    raw = {**config.to_dict(), "inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in raw.items()}


def _targets(module: PreTrainedModel, wanted: list[str] | str) -> list[str]:
    """What to tell peft: names, or ends of names, of linear layers."""
    parts = {name: part for name, part in module.named_modules() if name}
    head = module.get_output_embeddings()
    linear = [name for name, part in parts.items() if isinstance(part, nn.Linear | Conv1D) and part is not head]
    ends = sorted({name.rsplit(".", 1)[-1] for name in linear})
    if isinstance(wanted, str):
        is_clear = all(name in linear for name in parts if name.rsplit(".", 1)[-1] in ends)
        return ends if is_clear else linear
    for entry in wanted:
        found = [name for name in parts if name == entry or name.endswith(f".{entry}")]
        if not found:
            raise InvalidRequest(f"the model has no layer called {entry!r}; its linear layers are {', '.join(ends)}", param=TARGETS)
        wrong = [name for name in found if name not in linear]
        if wrong:
            raise InvalidRequest(
                f"{wrong[0]} cannot carry an adapter, only linear layers inside the model can: {', '.join(ends)}", param=TARGETS
            )
    return sorted(set(wanted))


def bare_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights by their names in the model without an adapter."""
    found = module.named_parameters()
    return {name.replace(".base_layer.", "."): tuple(weight.shape) for name, weight in found if ".lora_" not in name}


@contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Within: the module computes with its frozen weights alone."""
    layers = [part for part in module.modules() if isinstance(part, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class BaseNetwork(Network):
    """The policy's own module without its adapter: a reference that needs no weights of its own. Only for use under no_grad."""

    def hidden_of(self, ids_N: Tensor, positions_N: Tensor, plan: Plan) -> Tensor:
        """See `Network.hidden_of`."""
        with switched_off(self.module):
            return super().hidden_of(ids_N, positions_N, plan)

    def hidden_padded(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """See `Network.hidden_padded`."""
        with switched_off(self.module):
            return super().hidden_padded(ids_BL, mask_BL)
