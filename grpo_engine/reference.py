"""The frozen distribution KL is measured against: the policy's module without its adapter, or a copy of its weights.

A job that trains an adapter begins with a fresh one, so its bare base is the reference and is in memory already. A job that
trains all weights, or names a checkpoint, holds a copy in the policy's compute storage, run by the same code.

Same storage and same kernels make the KL of step 1 exactly 0. The copy is made from fp32 weights by the same rounding
that makes the policy's bf16 module.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_engine.adapter import BaseNetwork, bare_shapes
from grpo_engine.models import check_folder
from grpo_engine.network import Network, disable_dropout
from grpo_engine.policy import Policy, load_module, weights_sha256
from grpo_engine.sharding import Sharding


@dataclass
class Reference:
    """See the module's head. `load_reference` makes one."""

    network: Network
    sha256: str
    """Of the fp32 weights it was made from; equals `Policy.sha256` for the initial model. Changes with a sync."""

    @property
    def model(self) -> PreTrainedModel:
        """The transformers module."""
        return self.network.module

    @torch.no_grad()
    def sync(self, policy: Policy, alpha: float) -> None:
        """reference = alpha * policy + (1 - alpha) * reference, computed in fp32 from the policy's masters.

        With bf16 storage the result is rounded once; alpha = 1 gives exactly the policy's module. Not for a policy with an
        adapter, whose reference has no weights of its own (contract/job.py refuses the setting). Where weights are divided, those
        of policy and reference are cut alike.
        """
        for name, parameter in self._own().items():
            master = policy.masters[name]
            mixed = master if alpha == 1.0 else master * alpha + parameter.to(master.dtype) * (1 - alpha)
            parameter.copy_(mixed)
        weights = self.weights()
        self.sha256 = policy.ranks.first(lambda: weights_sha256(weights))

    def weights(self) -> dict[str, Tensor]:
        """All weights in their storage dtype, detached but not copied; needed in checkpoints once a sync has happened.

        Where they are divided: whole copies on the first rank, nothing on the others.
        """
        if self.network.sharding is not None:
            return self.network.sharding.gather(self.network.sharding.parts)
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def divide(self, policy: Policy) -> None:
        """Divide the weights over the ranks, after the policy's are. Nothing to do for one that is the policy's own module."""
        if self.model is policy.model:
            self.network.sharding = policy.sharding
        else:
            self.network.sharding = Sharding(self.model, policy.ranks, policy.device)

    def _own(self) -> dict[str, nn.Parameter]:
        """What this rank holds of each weight."""
        return dict(self.model.named_parameters()) if self.network.sharding is None else self.network.sharding.parts

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], sha256: str) -> None:
        """Restore weights saved from `weights()`. Raises ValueError when they belong to another model."""
        sharding = self.network.sharding
        shapes = {name: weight.shape for name, weight in self.model.named_parameters()} if sharding is None else sharding.shapes
        if {name: weight.shape for name, weight in weights.items()} != shapes:
            raise ValueError("the saved reference does not belong to this model")
        for name, parameter in self._own().items():
            parameter.copy_(weights[name] if sharding is None else sharding.own(name, weights[name]))
        if sharding is not None:
            sharding.release()
        self.sha256 = sha256


def load_reference(policy: Policy, folder: Path | None = None, *, is_divided: bool = False) -> Reference:
    """Freeze a copy of the policy's present weights, or load the reference from a folder of safetensors. With an adapter and no
    folder: the policy's own module with the adapter switched off.

    Call it before restoring a resume state into the policy, so that the reference is the root of the lineage. With `is_divided` a
    copy stays in main memory, for `Reference.divide`.
    Raises ValueError when the folder's weights have other names or shapes than the policy's.
    """
    if policy.adapter is not None and folder is None:
        network = policy.network
        return Reference(_like(network, BaseNetwork, network.module), policy.sha256)
    if folder is None:
        module = deepcopy(policy.model)
        weights = policy.weights()
    else:
        check_folder(folder)
        module = load_module(folder)
        weights = dict(module.named_parameters())
        if bare_shapes(module) != bare_shapes(policy.model):
            raise ValueError(f"the reference in {folder.name} is another architecture than the policy")
    sha256 = weights_sha256(weights)
    place = torch.device("cpu") if is_divided else policy.device.device
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
        parameter.data = parameter.data.to(place, policy.device.compute_dtype)
    module.to(place)
    if policy.network.is_branched and folder is not None:
        module.set_attn_implementation(policy.model.config._attn_implementation)
    disable_dropout(module)
    module.train()
    return Reference(_like(policy.network, Network, module), sha256)


def _like(network: Network, kind: type[Network], module: PreTrainedModel) -> Network:
    """The module with the ways of computing that the policy's comparisons left."""
    return kind(module, network.is_branched, network.why_not_branched, why_not_cached=network.why_not_cached)
