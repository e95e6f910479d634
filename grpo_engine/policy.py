"""The model being trained: fp32 master weights, the module that computes, tokenizer, end tokens.

In fp32 the module's own parameters are the masters. In mixed precision the module is stored in bf16 and the masters
stand beside it: each gradient moves to its master in fp32 as soon as backward has made it, and `refresh()` rounds the
masters into the module after an optimizer step. (Pure bf16 weights would lose updates of lr 1e-6.) With an adapter
(adapter.py) all this holds for the adapter alone; the base is frozen, in the compute storage, without masters. With weights that
are divided over the ranks (sharding.py) the masters are this rank's parts, and what gathers or sets whole weights is an act of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo_engine.adapter import Adapter, inject
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.job import LoraConfig
from grpo_engine.device import Device
from grpo_engine.gguf_model import OnProgress
from grpo_engine.models import check_folder, model_folder
from grpo_engine.network import Network, make_network
from grpo_engine.ranks import ALONE, Ranks
from grpo_engine.sharding import Sharding

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|END_OF_TURN_TOKEN|>")
"""Tokens that end an assistant's turn; each counts as an end token when the chat template writes it."""

_LOADING = Lock()
"""While transformers loads a model it replaces methods of its classes; two threads at once would leave them replaced for good."""


@dataclass
class Policy:
    """See the module's head. `load_policy` makes one."""

    network: Network
    """The module that computes, with its attention path."""
    masters: dict[str, nn.Parameter]
    """fp32 (or fp64) weights that are trained, by the module's parameter names; tied weights appear once. For the optimizer."""
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    """Any of these ends a completion."""
    pad_id: int
    """Filler in padded tensors. May equal an end token: what counts is decided by lengths, never by this value."""
    context_length: int
    """Most positions the model has, prompt and completion together."""
    sha256: str
    """Of the weights as loaded, without an adapter; see `weights_sha256`."""
    device: Device
    folder: Path
    """Where the weights came from."""
    config: Any
    """The configuration as loaded, before dropouts were set to 0."""
    adapter: Adapter | None = None
    """The adapter in the module; None when all weights are trained."""
    ranks: Ranks = ALONE
    """The processes that train it together."""

    @property
    def model(self) -> PreTrainedModel:
        """The transformers module that computes."""
        return self.network.module

    @property
    def sharding(self) -> Sharding | None:
        """How the weights are divided over the ranks; None where every rank holds all of them."""
        return self.network.sharding

    @property
    def num_parameters(self) -> int:
        """Trainable numbers, those of all ranks together where they are divided."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def num_in_memory(self) -> int:
        """All numbers of the module, trained or frozen."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The masters, in a fixed order, for the optimizer and gradient clipping; their `.grad` is filled by backward."""
        return list(self.masters.values())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring a change of the masters into the computing module. Call after every change; rounds in mixed precision."""
        if self.sharding is not None:
            self.sharding.release()
            return
        if not self.device.is_mixed:
            return
        for name, parameter in self.network.module.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(self.masters[name])

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set all masters (as from `weights()`) and refresh. Raises ValueError when names or shapes differ."""
        if set(weights) != set(self.masters):
            odd = sorted(set(weights) ^ set(self.masters))
            raise ValueError(f"weights do not belong to this model: {', '.join(odd[:5])}")
        for name, master in self.masters.items():
            shape = master.shape if self.sharding is None else self.sharding.shapes[name]
            if weights[name].shape != shape:
                raise ValueError(f"{name} has shape {tuple(weights[name].shape)} instead of {tuple(shape)}")
            master.copy_(weights[name] if self.sharding is None else self.sharding.own(name, weights[name]))
        self.refresh()

    def weights(self) -> dict[str, Tensor]:
        """The masters, detached but not copied. Where they are divided: whole copies on the first rank, nothing on the others."""
        if self.sharding is not None:
            return self.sharding.gather(self.masters)
        return {name: master.detach() for name, master in self.masters.items()}

    def frozen(self) -> dict[str, Tensor]:
        """What is not trained, by the module's names; where it is divided, as in `weights`."""
        if self.sharding is not None:
            return self.sharding.gather({name: part for name, part in self.sharding.parts.items() if not part.requires_grad})
        return {name: weight.detach() for name, weight in self.model.named_parameters() if not weight.requires_grad}

    def divide(self) -> None:
        """Divide weights, gradients and what the optimizer will keep over the ranks. An act of all, before anything is computed."""
        self.network.sharding = Sharding(self.model, self.ranks, self.device)
        self.masters = {name: part for name, part in self.network.sharding.parts.items() if part.requires_grad}

    def set_activation_checkpointing(self, is_on: bool) -> None:
        """Trade time for memory in the update: activations are recomputed in backward."""
        if is_on:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.activation_checkpointing_disable()


def load_policy(
    name: str,
    device: Device,
    cache_dir: Path,
    model_dir: Path | None = None,
    on_progress: OnProgress | None = None,
    *,
    lora: LoraConfig | None = None,
    seed: int = 0,
    is_divided: bool = False,
) -> Policy:
    """Load a model by name (see models.py) for training: all of it, or with `lora` a fresh adapter drawn from `seed`.

    With `is_divided` it stays in main memory, in fp32 where it is trained, for `Policy.divide`.
    Raises InvalidRequest (param `model`) for a model that cannot be trained here, Unavailable when the Hub is away.
    """
    folder = model_folder(name, cache_dir, model_dir, on_progress or (lambda done, total, what: None))
    return load_policy_folder(folder, device, lora=lora, seed=seed, name=name, is_divided=is_divided)


def load_policy_folder(
    folder: Path, device: Device, *, lora: LoraConfig | None = None, seed: int = 0, name: str | None = None, is_divided: bool = False
) -> Policy:
    """Load a model from a folder of safetensors, for example a published checkpoint. `name` is what the adapter calls its base."""
    check_folder(folder)
    module = load_module(folder)
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(module, tokenizer)
    config = deepcopy(module.config)
    sha256 = weights_sha256(dict(module.named_parameters()))
    adapter = None if lora is None else inject(module, lora, seed=seed, base_name=name or folder.name)
    if not is_divided:
        module.to(device.device)
    masters = split_masters(module, device, is_divided=is_divided)
    policy = Policy(
        network=make_network(module),
        masters=masters,
        tokenizer=tokenizer,
        eos_ids=end_tokens(module, tokenizer),
        pad_id=_pad_id(tokenizer),
        context_length=_context_length(module, tokenizer),
        sha256=sha256,
        device=device,
        folder=folder,
        config=config,
        adapter=adapter,
    )
    if device.is_mixed and not is_divided:
        _move_gradients(module, masters)
    return policy


def load_module(folder: Path) -> PreTrainedModel:
    """The bare transformers module in fp32. Refuses weights with missing parts, which would be random."""
    try:
        with _LOADING:
            module, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        raise InvalidRequest(f"{folder.name} cannot be loaded as a causal language model: {error}", param="model") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InvalidRequest(f"{folder.name} lacks weights, for example {', '.join(missing[:3])}", param="model")
    loaded: PreTrainedModel = module
    return loaded


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        raise InvalidRequest(f"the tokenizer of {folder.name} cannot be loaded: {error}", param="model") from error
    return tokenizer


def split_masters(module: PreTrainedModel, device: Device, *, is_divided: bool = False) -> dict[str, nn.Parameter]:
    """The master weights of all that is trained, by name. In mixed precision the module's parameters become bf16; its buffers
    stay as they are. To be divided, what is trained stays as it is: it is rounded whenever it is gathered."""
    if not device.is_mixed:
        return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    masters = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and is_divided:
            masters[name] = parameter
            continue
        if parameter.requires_grad:
            masters[name] = nn.Parameter(parameter.detach())
        parameter.data = parameter.detach().to(device.compute_dtype)
    return masters


def _move_gradients(module: PreTrainedModel, masters: dict[str, nn.Parameter]) -> None:
    """After each parameter's gradient is made, add it to its master in fp32 and drop the bf16 one."""

    def mover(master: nn.Parameter) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return move

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mover(masters[name]))


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Fingerprint of weights: names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def end_tokens(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a completion: the tokenizer's, the generation settings', and the template's end of turn."""
    found: set[int] = set()
    generation = getattr(module, "generation_config", None)
    for value in (tokenizer.eos_token_id, getattr(generation, "eos_token_id", None)):
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    vocabulary = tokenizer.get_vocab()
    template = chat.get("default", "") if isinstance(chat := tokenizer.chat_template or "", dict) else chat  # several by name, or one
    found.update(vocabulary[token] for token in END_OF_TURN if token in template and token in vocabulary)
    return frozenset(int(token) for token in found)


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            return value
    return 0


def _context_length(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    config = module.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    return min(int(limit) for limit in limits if limit is not None and 0 < limit < 2**40)


def _check_vocabulary(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A bigger embedding (padding rows) is fine and kept; a smaller one would fail in the middle of a step."""
    rows = module.get_input_embeddings().num_embeddings
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise InvalidRequest(
            f"the tokenizer has token ids up to {largest} and the model's embedding only {rows} rows; "
            "resize the embedding to the tokenizer and save the model again",
            param="model",
        )
