"""Per-token numbers over the whole vocabulary, without ever holding tokens times vocabulary.

For hidden states h, logits l = scale * (h W^T + b) / temperature and p = softmax(l), computes at each token
    logprob   log p[target]
    entropy   -sum_v p log p
    kl_pr     sum_v p (log p - log q)      KL(policy || reference), when a reference's hidden states and head are given
    kl_rp     sum_v q (log q - log p)      KL(reference || policy)
The vocabulary is walked in tiles with running maxima and sums (online softmax). Backward walks the tiles again, so peak
memory is one tile. In bf16 the products take bf16 inputs and give fp32 results; everything after them is fp32 or fp64.
Gradients flow to h, W and b from all four outputs; the reference is a constant.

Shapes: N tokens   V vocabulary (tile)   C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine.device import bf16_products
from grpo_engine.network import Head
from grpo_engine.row_counts import spare_rows

TILE_TOKENS = 2048
TILE_ELEMENTS = 4 * 1024 * 1024
"""Numbers in one tile: 16 MB in fp32."""


@dataclass(frozen=True)
class ReferenceStates:
    """The reference's side of an exact KL: final hidden states at the scored positions, and its head."""

    hidden_NC: Tensor
    head: Head


@dataclass(frozen=True)
class VocabularyStats:
    """Per-token results (N,); the exact KLs are None without a reference."""

    logprob_N: Tensor
    entropy_N: Tensor
    kl_policy_ref_N: Tensor | None
    kl_ref_policy_N: Tensor | None


def vocabulary_stats(
    hidden_NC: Tensor, head: Head, target_N: Tensor, temperature: float, reference: ReferenceStates | None = None
) -> VocabularyStats:
    """Log-probability of each target, entropy, and exact KL both ways, in fp32 (fp64 for fp64 inputs)."""
    count = len(hidden_NC)
    spare = spare_rows(count, hidden_NC.device)
    if reference is not None:
        reference = ReferenceStates(functional.pad(reference.hidden_NC, (0, 0, 0, spare)), reference.head)
    hidden_NC, target_N = functional.pad(hidden_NC, (0, 0, 0, spare)), functional.pad(target_N, (0, spare))
    outputs = _Stats.apply(  # type: ignore[no-untyped-call]
        hidden_NC, head.weight_VC, head.bias_V, target_N, head.scale / temperature, reference, temperature
    )
    logprob_N, entropy_N, kl_pr_N, kl_rp_N = (row_N[:count] for row_N in outputs)
    if reference is None:
        return VocabularyStats(logprob_N, entropy_N, None, None)
    return VocabularyStats(logprob_N, entropy_N, kl_pr_N, kl_rp_N)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _tile_width(tokens: int, vocabulary: int) -> int:
    return min(vocabulary, max(256, TILE_ELEMENTS // max(tokens, 1)))


class _Tiles:
    """Logits of one head, tile by tile, into one reused buffer."""

    def __init__(self, hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, factor: float) -> None:
        self._is_narrow = weight_VC.dtype == torch.bfloat16
        self._is_cpu = weight_VC.device.type == "cpu"
        self.hidden_NC = _widen(hidden_NC)
        self._weight_VC, self._bias_V, self._factor = weight_VC, bias_V, factor
        self._buffer: Tensor | None = None

    def weight(self, tile: slice) -> Tensor:
        """The tile of the weight, widened."""
        return _widen(self._weight_VC[tile])

    def products(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """left @ right into out; bf16 inputs with fp32 accumulation when the weights are bf16."""
        with bf16_products(self._is_narrow and self._is_cpu):
            if self._is_narrow and not self._is_cpu:
                return torch.mm(left.bfloat16(), right.bfloat16(), out_dtype=torch.float32, out=out)
            return torch.mm(left, right, out=out)

    def logits(self, tile: slice) -> Tensor:
        """Scaled logits (N, tile); valid until the next call."""
        tokens, width = len(self.hidden_NC), tile.stop - tile.start
        if self._buffer is None or self._buffer.shape != (tokens, width):
            self._buffer = self.hidden_NC.new_empty(tokens, width)
        logits = self.products(self.hidden_NC, self.weight(tile).t(), self._buffer)
        if self._bias_V is not None:
            logits += _widen(self._bias_V[tile])
        return logits if self._factor == 1.0 else logits.mul_(self._factor)


class _Running:
    """Running maximum, partition sum, and sums weighted by exp(logit), over vocabulary tiles."""

    def __init__(self, like_N: Tensor, weighted: int) -> None:
        double = like_N.double()
        self.max_N = torch.full_like(double, float("-inf"))
        self.sum_N = torch.zeros_like(double)
        self.weighted = [torch.zeros_like(double) for _ in range(weighted)]

    def add(self, logits_NV: Tensor, scratch_NV: Tensor, product_NV: Tensor, others: list[Tensor]) -> None:
        """Take in one tile; `others` are the (N, V) values to be averaged under this distribution."""
        new_max_N = torch.maximum(self.max_N, logits_NV.amax(1).double())
        decay_N = torch.exp(self.max_N - new_max_N)
        weight_NV = torch.sub(logits_NV, new_max_N.to(logits_NV.dtype)[:, None], out=scratch_NV).exp_()
        self.sum_N = self.sum_N * decay_N + weight_NV.sum(1)
        for number, other_NV in enumerate(others):
            self.weighted[number] = self.weighted[number] * decay_N + torch.mul(weight_NV, other_NV, out=product_NV).sum(1)
        self.max_N = new_max_N

    @property
    def log_partition_N(self) -> Tensor:
        return self.max_N + self.sum_N.log()

    def mean(self, number: int) -> Tensor:
        return self.weighted[number] / self.sum_N


def _take_target(logits_NV: Tensor, tile: slice, target_N: Tensor, chosen_N: Tensor) -> None:
    """Note the logits of the targets that fall into this tile."""
    inside_N = (target_N >= tile.start) & (target_N < tile.stop)
    local_N = (target_N - tile.start).clamp(0, tile.stop - tile.start - 1)
    chosen_N.copy_(torch.where(inside_N, logits_NV.gather(1, local_N[:, None])[:, 0], chosen_N))


class _Stats(torch.autograd.Function):
    """See the module's head. Saves the log-partition functions; recomputes logits in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        factor: float,
        reference: ReferenceStates | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = [
            _forward_chunk(hidden_NC[rows], weight_VC, bias_V, target_N[rows], factor, _rows(reference, rows), temperature)
            for rows in _chunks(len(target_N), TILE_TOKENS)
        ]
        logprob, entropy, kl_pr, kl_rp, log_z, log_zr = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_NC, weight_VC, bias_V, target_N, log_z, log_zr, entropy, kl_pr)
        ctx.factor, ctx.reference, ctx.temperature = factor, reference, temperature
        dtype = torch.float64 if hidden_NC.dtype == torch.float64 else torch.float32
        return logprob.to(dtype), entropy.to(dtype), kl_pr.to(dtype), kl_rp.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NC, weight_VC, bias_V, target_N, log_z, log_zr, entropy, kl_pr = ctx.saved_tensors
        wide = torch.float64 if hidden_NC.dtype == torch.float64 else torch.float32
        grad_hidden = torch.zeros(hidden_NC.shape, dtype=wide, device=hidden_NC.device) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight_VC.shape, dtype=wide, device=hidden_NC.device) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(len(weight_VC), dtype=wide, device=hidden_NC.device) if ctx.needs_input_grad[2] else None
        for rows in _chunks(len(target_N), TILE_TOKENS):
            tiles = _Tiles(hidden_NC[rows], weight_VC, bias_V, ctx.factor)
            saved = (log_z[rows], log_zr[rows], entropy[rows], kl_pr[rows])
            grads_of_rows = tuple(grad[rows] for grad in grads)
            chunk = _Backward(tiles, target_N[rows], saved, grads_of_rows, _rows(ctx.reference, rows), ctx.temperature)
            chunk.run(weight_VC, ctx.factor, None if grad_hidden is None else grad_hidden[rows], grad_weight, grad_bias)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NC.dtype),
            None if grad_weight is None else grad_weight.to(weight_VC.dtype),
            None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def _rows(reference: ReferenceStates | None, rows: slice) -> ReferenceStates | None:
    return None if reference is None else ReferenceStates(reference.hidden_NC[rows], reference.head)


def _reference_tiles(reference: ReferenceStates, temperature: float) -> _Tiles:
    head = reference.head
    return _Tiles(reference.hidden_NC, head.weight_VC, head.bias_V, head.scale / temperature)


def _forward_chunk(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    factor: float,
    reference: ReferenceStates | None,
    temperature: float,
) -> tuple[Tensor, ...]:
    """(logprob, entropy, kl_pr, kl_rp, log_partition, reference's log_partition), all float64 (N,)."""
    tiles = _Tiles(hidden_NC, weight_VC, bias_V, factor)
    theirs = None if reference is None else _reference_tiles(reference, temperature)
    vocabulary, width = len(weight_VC), _tile_width(len(target_N), len(weight_VC))
    chosen_N = tiles.hidden_NC.new_zeros(len(target_N))
    ours_run = _Running(chosen_N, 1 if theirs is None else 2)
    their_run = None if theirs is None else _Running(chosen_N, 1)
    scratch: Tensor | None = None
    for tile in _chunks(vocabulary, width):
        logits_NV = tiles.logits(tile)
        _take_target(logits_NV, tile, target_N, chosen_N)
        if scratch is None or scratch.shape != logits_NV.shape:
            scratch, product, gap = (torch.empty_like(logits_NV) for _ in range(3))
        if theirs is None or their_run is None:
            ours_run.add(logits_NV, scratch, product, [logits_NV])
            continue
        their_logits_NV = theirs.logits(tile)
        torch.sub(logits_NV, their_logits_NV, out=gap)
        ours_run.add(logits_NV, scratch, product, [logits_NV, gap])
        their_run.add(their_logits_NV, scratch, product, [gap])
    log_z = ours_run.log_partition_N
    zero = torch.zeros_like(log_z)
    logprob, entropy = chosen_N.double() - log_z, log_z - ours_run.mean(0)
    if their_run is None:
        return logprob, entropy, zero, zero, log_z, zero
    log_zr = their_run.log_partition_N
    return logprob, entropy, ours_run.mean(1) - log_z + log_zr, log_z - log_zr - their_run.mean(0), log_z, log_zr


class _Backward:
    """Gradients of one chunk of tokens.

    d logprob/dl = onehot - p      d entropy/dl = -p (log p + H)
    d kl_pr/dl = p (log p - log q - kl_pr)      d kl_rp/dl = p - q
    """

    def __init__(
        self,
        tiles: _Tiles,
        target_N: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        grads: tuple[Tensor, ...],
        reference: ReferenceStates | None,
        temperature: float,
    ) -> None:
        wide = tiles.hidden_NC.dtype
        self._tiles, self._target_N = tiles, target_N
        self._log_z, self._log_zr, self._entropy, self._kl_pr = (value.to(wide)[:, None] for value in saved)
        self._logprob_grad, self._entropy_grad, self._pr_grad, self._rp_grad = (grad.to(wide)[:, None] for grad in grads)
        self._theirs = None if reference is None else _reference_tiles(reference, temperature)
        self._wants_entropy = bool(self._entropy_grad.any())
        self._wants_exact = reference is not None and bool(self._pr_grad.any() | self._rp_grad.any())

    def run(
        self, weight_VC: Tensor, factor: float, grad_hidden: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
    ) -> None:
        """Add this chunk's gradients to the given sums."""
        hidden = self._tiles.hidden_NC
        product_h: Tensor | None = None
        for tile in _chunks(len(weight_VC), _tile_width(len(hidden), len(weight_VC))):
            grad_NV = self._logit_grad(tile)
            if factor != 1.0:
                grad_NV.mul_(factor)
            if grad_hidden is not None:
                product_h = torch.empty_like(hidden) if product_h is None else product_h
                grad_hidden += self._tiles.products(grad_NV, self._tiles.weight(tile), product_h)
            if grad_weight is not None:
                grad_weight[tile] += self._tiles.products(grad_NV.t(), hidden, torch.empty_like(grad_weight[tile]))
            if grad_bias is not None:
                grad_bias[tile] += grad_NV.sum(0)

    def _logit_grad(self, tile: slice) -> Tensor:
        """Gradient with respect to the scaled logits of one tile (N, tile)."""
        logprob_NV = self._tiles.logits(tile).sub_(self._log_z)
        share_NV = logprob_NV.exp()
        factor_NV: Tensor = -self._logprob_grad
        if self._wants_entropy:
            factor_NV = factor_NV - self._entropy_grad * (logprob_NV + self._entropy)
        if not self._wants_exact or self._theirs is None:
            grad_NV = share_NV.mul_(factor_NV)
        else:
            ref_logprob_NV = self._theirs.logits(tile).sub_(self._log_zr)
            factor_NV = factor_NV + self._pr_grad * (logprob_NV - ref_logprob_NV - self._kl_pr) + self._rp_grad
            grad_NV = share_NV.mul_(factor_NV).sub_(ref_logprob_NV.exp_().mul_(self._rp_grad))
        inside_N = ((self._target_N >= tile.start) & (self._target_N < tile.stop)).nonzero()[:, 0]
        grad_NV[inside_N, self._target_N[inside_N] - tile.start] += self._logprob_grad[inside_N, 0]
        return grad_NV
