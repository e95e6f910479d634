"""A policy's weights as files that transformers and peft load: what a published checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from grpo_engine.adapter import ADAPTER_DIR, Adapter
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.policy import Policy, load_module


def save_published(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write weights (fp32), configuration, tokenizer and generation settings into an existing or new folder.

    `AutoModelForCausalLM.from_pretrained(folder)` loads the result as it is. With an adapter the weights are the base's, read
    anew in fp32, with the adapter merged, and `adapter/` beside them holds the adapter alone, as peft loads it over the base.
    `weights` are those of the policy, `published_weights`, gathered before by all ranks where they are divided.
    Raises OSError when the disk refuses or the base is gone. Atomicity is the caller's (checkpoint.py).
    """
    weights = published_weights(policy) if weights is None else weights
    module = policy.model if policy.adapter is None else _merged(policy, policy.adapter, weights)
    masters = weights if policy.adapter is None else {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state = {name: masters.get(names.get(id(value), ""), value).detach() for name, value in module.state_dict(keep_vars=True).items()}
    module.save_pretrained(folder, state_dict=state)
    config = deepcopy(policy.config)
    config.dtype = next(iter(policy.masters.values())).dtype
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    if policy.adapter is not None:
        policy.adapter.save(folder / ADAPTER_DIR, {name: weights[name] for name in policy.masters})


def published_weights(policy: Policy) -> dict[str, Tensor]:
    """What `save_published` needs: the masters, and with an adapter the frozen base, to compare the one on the disk with."""
    return policy.weights() if policy.adapter is None else policy.weights() | policy.frozen()


def _merged(policy: Policy, adapter: Adapter, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The bare model in fp32 with the adapter in its weights."""
    try:
        base = load_module(policy.folder)
    except InvalidRequest as error:
        raise OSError(f"the base model, which the adapter is merged with, cannot be read again: {error}") from error
    adapter.merge_into(base, weights)
    return base
