"""Sampling follows the model's distribution, depends on its keys alone, and knows where a completion ends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from grpo_engine.batch import Completion, Group, Prompt
from grpo_engine.contract.job import SamplingConfig
from grpo_engine.decode import BranchedDecoder
from grpo_engine.logprob import MicroBatch, token_stats
from grpo_engine.plain_decode import CachedDecoder
from grpo_engine.policy import Policy
from grpo_engine.rollout import choose_tokens, invert_cumulative, sample_groups, uniforms
from tests.engine.model_fixtures import SHAPES, tiny_policy


def _prompts(policy: Policy, *texts: str) -> list[Prompt]:
    return [Prompt(10 + number, text, policy.tokenizer.encode(text, add_special_tokens=False), {}) for number, text in enumerate(texts)]


def _sampling(limit: int = 16, temperature: float = 1.0, top_p: float = 1.0) -> SamplingConfig:
    return SamplingConfig(max_completion_tokens=limit, temperature=temperature, top_p=top_p)


def _rows(groups: list[Group]) -> list[tuple[Prompt, Completion]]:
    return [(group.prompt, completion) for group in groups for completion in group.completions]


def _chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def _limit(degrees: int) -> float:
    """Chi-square value exceeded with probability about 1e-5 (Wilson and Hilferty's approximation, z = 4.26)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.26 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("compact_below", [0.0, 1.0], ids=["without compaction", "with compaction"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_sampled_frequencies_match_the_distribution(tmp_path: Path, compact_below: float, temperature: float, top_p: float) -> None:
    """First and second token of 4,000 completions against the enumerated distribution over 17 tokens."""
    policy = tiny_policy(tmp_path, "TINY_SHORT")
    prompt = _prompts(policy, "1+2=")
    groups = sample_groups(policy, prompt, 4000, _sampling(3, temperature, top_p), seed=1, step=1, compact_below=compact_below)
    completions = groups[0].completions
    firsts = torch.bincount(torch.tensor([completion.token_ids[0] for completion in completions]), minlength=17)
    share = _distribution(policy, prompt[0].token_ids, temperature, top_p)
    inside = share > 0
    assert firsts[~inside].sum() == 0
    assert _chi_square(firsts[inside].double(), 4000 * share[inside]) < _limit(int(inside.sum()) - 1)
    favourite = int(max((token for token in range(17) if token not in policy.eos_ids), key=lambda token: int(firsts[token])))
    seconds = torch.tensor([completion.token_ids[1] for completion in completions if completion.token_ids[0] == favourite])
    share = _distribution(policy, [*prompt[0].token_ids, favourite], temperature, top_p)
    inside = share > 0
    counts = torch.bincount(seconds, minlength=17)
    assert counts[~inside].sum() == 0
    assert _chi_square(counts[inside].double(), len(seconds) * share[inside]) < _limit(int(inside.sum()) - 1)


def _distribution(policy: Policy, ids: list[int], temperature: float, top_p: float) -> torch.Tensor:
    share = torch.softmax(policy.model(torch.tensor([ids])).logits[0, -1].double() / temperature, 0).detach()
    ordered, order = share.sort(descending=True)
    keep = ordered.cumsum(0) - ordered < top_p
    kept = torch.zeros_like(share)
    kept[order[keep]] = ordered[keep]
    return kept / kept.sum()


@pytest.mark.parametrize("shape", SHAPES)
def test_sampler_logprobs_are_the_policys(tmp_path: Path, shape: str) -> None:
    kind, changes = SHAPES[shape]
    policy = tiny_policy(tmp_path, kind, **changes)
    assert policy.network.is_branched
    rows = _rows(sample_groups(policy, _prompts(policy, "1+1=", "a much longer prompt", "x"), 4, _sampling(temperature=0.7), 3, 1))
    stats = token_stats(policy.network, MicroBatch(list(range(len(rows))), rows), temperature=0.7, pad_id=policy.pad_id)
    for number, (_, completion) in enumerate(rows):
        found = torch.tensor(completion.sampler_logprobs)
        torch.testing.assert_close(found, stats.logprob_BT[number, : len(found)].detach(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plain_decoder_samples_the_same(tmp_path: Path, shape: str) -> None:
    kind, changes = SHAPES[shape]
    policy = tiny_policy(tmp_path, kind, **changes)
    prompts = _prompts(policy, "1+1=", "a much longer prompt", "x")
    fast = _rows(sample_groups(policy, prompts, 4, _sampling(), 3, 1))
    policy.network.is_branched = False
    plain = _rows(sample_groups(policy, prompts, 4, _sampling(), 3, 1))
    assert [completion.token_ids for _, completion in fast] == [completion.token_ids for _, completion in plain]


def test_decoders_agree_after_rows_are_dropped(tmp_path: Path) -> None:
    """Logits step by step, dropping rows, then a whole group, across a growth of the buffer."""
    policy = tiny_policy(tmp_path, "TINY_QWEN2", sliding_window=6)
    fast, plain = BranchedDecoder(policy.network, 100), CachedDecoder(policy.network)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]]
    with torch.no_grad():
        torch.testing.assert_close(fast.start(prompts, 3), plain.start(prompts, 3), rtol=0, atol=5e-5)
        for step in range(70):
            if step in (2, 4):
                index = torch.tensor([0, 2, 3, 5] if step == 2 else [2, 3])
                fast.keep(index)
                plain.keep(index)
            count = 6 if step < 2 else 4 if step < 4 else 2
            tokens = torch.arange(count) * 7 + step
            torch.testing.assert_close(fast.step(tokens), plain.step(tokens), rtol=0, atol=5e-5)


def test_results_depend_on_the_keys_alone(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, "TINY_SHORT")
    prompts = _prompts(policy, "1+2=", "3+4=", "5+6=7")

    def tokens(chosen: list[Prompt], size: int, seed: int, step: int, compact_below: float = 0.85) -> dict[int, list[list[int]]]:
        groups = sample_groups(policy, chosen, size, _sampling(), seed, step, compact_below=compact_below)
        return {group.prompt.row: [completion.token_ids for completion in group.completions] for group in groups}

    base = tokens(prompts, 6, 1, 1)
    assert tokens(prompts[::-1], 6, 1, 1) == base
    assert tokens(prompts, 6, 1, 1, compact_below=0.0) == base
    assert tokens(prompts, 6, 1, 1, compact_below=1.0) == base
    assert tokens(prompts[1:2], 3, 1, 1) == {11: base[11][:3]}
    assert tokens(prompts, 6, 2, 1) != base
    assert tokens(prompts, 6, 1, 2) != base
    assert len({tuple(row) for row in base[10]}) > 1


def test_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, "TINY_SHORT")
    before = torch.get_rng_state()
    sample_groups(policy, _prompts(policy, "1+2="), 2, _sampling(), 1, 1)
    assert torch.equal(before, torch.get_rng_state())


def test_random_streams_do_not_depend_on_their_length() -> None:
    assert torch.equal(uniforms(1, 2, 3, 4, 100)[:7], uniforms(1, 2, 3, 4, 7))
    assert not torch.equal(uniforms(1, 2, 3, 4, 7), uniforms(1, 2, 3, 5, 7))


def test_the_end_token_is_kept_and_its_absence_is_called_truncated(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, "TINY_SHORT")
    completions = [c for _, c in _rows(sample_groups(policy, _prompts(policy, "1+2="), 64, _sampling(8), 1, 1))]
    ended = [completion for completion in completions if not completion.is_truncated]
    cut = [completion for completion in completions if completion.is_truncated]
    assert ended
    assert cut
    for completion in ended:
        assert completion.token_ids[-1] in policy.eos_ids
        assert not policy.eos_ids & set(completion.token_ids[:-1])
    for completion in cut:
        assert len(completion.token_ids) == 8
        assert not policy.eos_ids & set(completion.token_ids)
    for completion in completions:
        assert len(completion.sampler_logprobs) == len(completion.token_ids)
        assert "<" not in completion.text


def test_ending_on_the_last_allowed_token_is_no_truncation(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, "TINY_SHORT")
    completions = [c for _, c in _rows(sample_groups(policy, _prompts(policy, "1+2="), 64, _sampling(1), 1, 1))]
    assert {completion.is_truncated for completion in completions} == {True, False}
    assert all(completion.is_truncated == (completion.token_ids[0] not in policy.eos_ids) for completion in completions)


def test_text_of_a_completion_is_the_decoded_bytes(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    completion = sample_groups(policy, _prompts(policy, "1+2="), 2, _sampling(), 1, 1)[0].completions[0]
    special = set(policy.tokenizer.all_special_ids)
    assert completion.text == policy.tokenizer.decode([token for token in completion.token_ids if token not in special])


def test_ids_beyond_the_tokenizer_are_sampled_and_decoded_without_harm(tmp_path: Path) -> None:
    """C09: padding rows of a bigger embedding belong to the distribution; their text is empty."""
    policy = tiny_policy(tmp_path, "TINY_BIGVOCAB")
    completions = sample_groups(policy, _prompts(policy, "1+2="), 16, _sampling(), 1, 1)[0].completions
    assert max(token for completion in completions for token in completion.token_ids) >= len(policy.tokenizer)
    assert all(isinstance(completion.text, str) for completion in completions)


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    with pytest.raises(ValueError, match="context of 256"):
        sample_groups(policy, _prompts(policy, "x" * 250), 2, _sampling(16), 1, 1)


def test_inverting_a_cumulative_distribution_never_picks_an_impossible_token() -> None:
    weight = torch.zeros(4, 1000)
    weight[:, [3, 700]] = torch.tensor([0.25, 0.75])
    uniform = torch.tensor([0.0, 0.2499, 0.2501, 1.0 - 1e-16], dtype=torch.float64)
    token, total = invert_cumulative(weight, uniform)
    assert token.tolist() == [3, 3, 700, 700]
    assert total.tolist() == [1.0] * 4
    assert invert_cumulative(torch.eye(3), torch.tensor([0.0, 0.5, 0.999]))[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.999999])
def test_a_tiny_nucleus_is_the_argmax_with_log_probability_zero(uniform: float) -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
    token, logprob = choose_tokens(logits, torch.full((5,), uniform), 1.0, 1e-9)
    assert token.tolist() == logits.argmax(1).tolist()
    assert logprob.abs().max() == 0


def test_a_wide_nucleus_looks_beyond_the_first_candidates() -> None:
    """Flat logits over 3,000 tokens: top-p 0.9 keeps 2,700 of them, more than the first guess of 1,024."""
    count = 500
    logits = torch.linspace(0, 1e-3, 3000).expand(count, -1)
    token, logprob = choose_tokens(logits, torch.linspace(0, 1 - 1e-9, count, dtype=torch.float64), 1.0, 0.9)
    assert 290 <= int(token.min()) <= 310
    assert len(set(token.tolist())) > 400
    torch.testing.assert_close(logprob, torch.full((count,), -math.log(2700), dtype=torch.float64), rtol=0, atol=2e-3)
