"""Which rows of a step are this rank's, and their micro-batches. Indices are those of the whole rollout."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_engine.batch import Rollout
from grpo_engine.logprob import MicroBatch, Row, split_rows
from grpo_engine.ranks import Ranks


def own_rows(ranks: Ranks, rollout: Rollout) -> range:
    """The rows of this rank's share of the groups."""
    groups = ranks.share_of(len(rollout.groups))
    first, last = (sum(len(group.completions) for group in rollout.groups[:at]) for at in (groups.start, groups.stop))
    return range(first, last)


def split_own(rows: Sequence[Row], own: range, tokens: int, is_branched: bool) -> list[MicroBatch]:
    """Micro-batches of at most so many tokens; none when the share is empty."""
    return split_again([MicroBatch(list(own), [rows[at] for at in own])], tokens, is_branched)


def split_again(batches: Sequence[MicroBatch], tokens: int, is_branched: bool) -> list[MicroBatch]:
    """The same rows by another budget."""
    index = [at for batch in batches for at in batch.index]
    rows = [row for batch in batches for row in batch.rows]
    anew = split_rows(rows, tokens, is_branched) if rows else []
    return [MicroBatch([index[at] for at in batch.index], batch.rows) for batch in anew]
