"""Views of the per-token KL that telemetry shows on request: by position, by length, and its largest tokens.

Shapes: B rows, T completion tokens, K tokens asked for. Units: nats. Leaves out the statistics of every step (kl.kl_statistics).
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_length_correlation(value_BT: Tensor, mask_BT: Tensor) -> float | None:
    """Correlation over completions between length and summed KL; None when there are fewer than 3, or either does not vary."""
    mask_BT = mask_BT.bool()
    is_counted_B = mask_BT.any(-1)
    length_B = mask_BT.sum(-1)[is_counted_B].double()
    sum_B = value_BT.detach().double().where(mask_BT, 0.0).sum(-1)[is_counted_B]
    if length_B.numel() < 3:
        return None
    length_B, sum_B = length_B - length_B.mean(), sum_B - sum_B.mean()
    scale = float(length_B.norm() * sum_B.norm())
    return float(length_B @ sum_B) / scale if scale > 0 else None


def kl_by_position(value_BT: Tensor, mask_BT: Tensor) -> tuple[list[float | None], list[int]]:
    """Mean KL at each completion position over the rows that reach it (None where none does), and how many do."""
    mask_BT = mask_BT.bool()
    count_T = mask_BT.sum(0)
    mean_T = value_BT.detach().double().where(mask_BT, 0.0).sum(0) / count_T.clamp(min=1)
    counts: list[int] = count_T.tolist()
    return [mean if count else None for mean, count in zip(mean_T.tolist(), counts, strict=True)], counts


def top_kl_tokens(value_BT: Tensor, mask_BT: Tensor, count: int) -> list[tuple[int, int, float]]:
    """The `count` tokens with the largest KL as (row, position, nats), largest first."""
    mask_BT = mask_BT.bool()
    flat_N = value_BT.detach().double().where(mask_BT, -torch.inf).flatten()
    value_K, index_K = flat_N.topk(min(count, int(mask_BT.sum())))
    width = mask_BT.shape[-1]
    return [(index // width, index % width, value) for value, index in zip(value_K.tolist(), index_K.tolist(), strict=True)]
