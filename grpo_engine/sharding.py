"""One module whose weights, gradients and optimizer state are divided over the ranks (FSDP2, torch's `fully_shard`).

Each rank keeps its part of every weight. A decoder layer is gathered for its own forward and backward and freed after each;
embeddings, head and final norm are one more group, gathered for a whole forward and backward, because the head is applied outside
the module (vocabulary.py). Gradients are summed over the ranks and left divided. The kept parts are the fp32 masters; in mixed
precision the gathered weights are bf16.

With divided weights every forward and every backward is an act of all ranks: those that have fewer micro-batches take part with
`IDLE`. Sampling has no such rhythm, so all weights are gathered for it (`whole`). A tensor of n rows is cut like `torch.chunk`:
each rank has ceil(n / ranks) rows, the last ones fewer or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from grpo_engine.batch import Completion, Prompt
from grpo_engine.device import Device
from grpo_engine.logprob import MicroBatch
from grpo_engine.network import body_of
from grpo_engine.ranks import Ranks

_BODY = "grpo_body"
"""Name of the method that runs the module without its head, as one forward in FSDP's eyes."""

IDLE = MicroBatch([], [(Prompt(0, "", [0], {}), Completion([0], [0.0], "", True))])
"""What a rank computes, and throws away, while others still have micro-batches."""


class Sharding:
    """See the module's head. All but `own`, `hand_over` and `release` are acts of all ranks together."""

    def __init__(self, module: PreTrainedModel, ranks: Ranks, device: Device) -> None:
        """Divide the module in place. It may stand in main memory: layer after layer goes to the device, and a part of it stays.

        Parameters that are trained must be fp32 (fp64 in tests), whatever the compute dtype.
        """
        self._ranks = ranks
        self._module = module
        self._depth = 0
        self.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        """Of the whole weights."""
        self._layers = [_divide(layer, ranks, device) for layer in _layers(module)]
        setattr(module, _BODY, partial(_body, module))
        self._root = _divide(module, ranks, device)
        register_fsdp_forward_method(module, _BODY)
        ids = torch.zeros(1, 1, dtype=torch.long, device=device.device)
        with torch.no_grad():  # the first forward settles which module is the root, and where the parts lie
            self.body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        self.release()
        self._weights = {name: cast(DTensor, weight) for name, weight in module.named_parameters()}
        with torch.no_grad():
            self.parts = {name: nn.Parameter(weight.to_local(), weight.requires_grad) for name, weight in self._weights.items()}
        """This rank's part of every weight, in the same memory as the module's own. May be empty."""

    def body(self, **inputs: Any) -> Tensor:
        """Final hidden states: the module's forward without its head."""
        hidden: Tensor = getattr(self._module, _BODY)(**inputs)
        return hidden

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within, and without gradients: every rank holds all weights, and may run as many forwards as it likes."""
        self._depth += 1
        if self._depth == 1:
            for part in (*self._layers, self._root):
                part.unshard()
            for layer in self._layers:
                layer.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                for layer in self._layers:
                    layer.set_reshard_after_forward(True, recurse=False)
                self.release()

    def release(self) -> None:
        """Free what is gathered; the next forward gathers anew. Needed after every change of the parts, by every rank."""
        for part in (*self._layers, self._root):
            part.reshard()

    def hand_over(self) -> None:
        """Move the summed gradients to the parts; a part whose weight has none keeps none."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                self.parts[name].grad = None if weight.grad is None else cast(DTensor, weight.grad).to_local()
                weight.grad = None

    def sum(self, value: float) -> float:
        """The sum over the ranks, the same bits on each."""
        total = torch.tensor([value], dtype=torch.float64)
        self._ranks.add(total)
        return float(total)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor of the weight's shape."""
        first, last = self._rows(name, self._ranks.rank)
        return whole[first:last]

    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors in main memory from parts by the weights' names: on the first rank; the others get nothing.

        Each may be of another dtype than the weight: the optimizer's moments are gathered like this too.
        """
        self.release()
        found = {}
        for name, part in parts.items():
            most = self._rows(name, 0)[1]
            padded = part.detach().new_zeros(most, *self.shapes[name][1:])
            padded[: len(part)] = part.detach()
            pieces = self._ranks.to_first(padded)
            if pieces is not None:
                found[name] = torch.cat([piece.cpu() for piece in pieces])[: self.shapes[name][0]]
        return found

    def _rows(self, name: str, rank: int) -> tuple[int, int]:
        total = self.shapes[name][0]
        each = -(-total // self._ranks.size)
        return min(rank * each, total), min((rank + 1) * each, total)


def _body(module: PreTrainedModel, **inputs: Any) -> Tensor:
    hidden: Tensor = body_of(module)(**inputs).last_hidden_state
    return hidden if hidden._base is None else hidden.clone()  # FSDP hangs its hooks on the result, and warns of views


def _layers(module: PreTrainedModel) -> list[nn.Module]:
    """The parts that transformers never splits over devices: its decoder layers. Those inside others belong to them."""
    names = set(module._no_split_modules or ())
    found = {name: part for name, part in module.named_modules() if name and type(part).__name__ in names}
    return [part for name, part in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def _divide(module: nn.Module, ranks: Ranks, device: Device) -> FSDPModule:
    """One group of weights that is gathered and reduced together. Gradients are summed, not averaged: losses have the whole step's
    denominators."""
    mixed = MixedPrecisionPolicy(cast_forward_inputs=False)
    if device.is_mixed:
        mixed = MixedPrecisionPolicy(param_dtype=device.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    divided = fully_shard(module, mesh=ranks.mesh, mp_policy=mixed)
    divided.set_gradient_divide_factor(1.0)
    divided.set_force_sum_reduction_for_comms(True)
    divided.set_reduce_scatter_unused_params(True, recurse=False)
    return divided
