"""Rows become prompts with one begin-of-text token, and come in an order that a cursor continues exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_engine.batch import Prompt
from grpo_engine.contract.data import DataConfig
from grpo_engine.dataset import Dataset, make_prompts, num_untemplated, render
from grpo_engine.outcome import ConfigError
from grpo_engine.rows import Row

WORDS = ["<s>", "</s>", "<unk>", "hello", "world", "be", "brief", "user", "system", "assistant", ":"]
TEMPLATE = "{{ bos_token }}{% for m in messages %} {{ m.role }} : {{ m.content }}{% endfor %} assistant :"


def make_tokenizer(*, post: str | None = "<s> $A", template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Whole words as tokens; `post` is what the tokenizer puts around every text."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post is not None:
        backend.post_processor = processors.TemplateProcessing(single=post, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def words(token_ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in token_ids)


def messages(text: str = "hello") -> Row:
    return Row(line=1, messages=[{"role": "user", "content": text}], text=None, item={})


def plain(text: str) -> Row:
    return Row(line=1, messages=None, text=text, item={})


def test_messages_go_through_the_template_with_one_begin_token() -> None:
    text, token_ids = render(messages(), make_tokenizer(), DataConfig())
    assert text == "<s> user : hello assistant :"
    assert words(token_ids) == "<s> user : hello assistant :"


def test_text_gets_one_begin_token_whether_or_not_it_holds_one() -> None:
    for text in ("hello world", "<s> hello world"):
        assert words(render(plain(text), make_tokenizer(), DataConfig())[1]) == "<s> hello world"


def test_a_tokenizer_without_begin_token_adds_none() -> None:
    assert words(render(plain("hello"), make_tokenizer(post=None), DataConfig())[1]) == "hello"


def test_an_end_token_of_the_tokenizers_own_is_removed_and_one_in_the_text_stays() -> None:
    tokenizer = make_tokenizer(post="<s> $A </s>")
    assert words(render(plain("hello"), tokenizer, DataConfig())[1]) == "<s> hello"
    kept = make_tokenizer(post="<s> $A")
    assert words(render(plain("hello </s>"), kept, DataConfig())[1]) == "<s> hello </s>"


def test_the_system_prompt_comes_first_unless_the_row_has_one() -> None:
    data = DataConfig(system_prompt="be brief")
    assert render(messages(), make_tokenizer(), data)[0] == "<s> system : be brief user : hello assistant :"
    assert render(plain("hello"), make_tokenizer(), data)[0] == "be brief\n\nhello"
    own = Row(1, [{"role": "system", "content": "world"}, {"role": "user", "content": "hello"}], None, {})
    assert "be brief" not in render(own, make_tokenizer(), data)[0]


def test_a_model_without_template_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no chat template") as caught:
        render(messages(), make_tokenizer(template=None), DataConfig())
    assert caught.value.param == "method.grpo.data.chat_template"


def test_a_template_that_refuses_names_the_line() -> None:
    tokenizer = make_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match=r"line 1: .*roles must alternate"):
        render(messages(), tokenizer, DataConfig())


@pytest.mark.parametrize("template", ["{{ 1 + messages[0].content }}", "{{ messages[0].content.pop() }}", "{{ 1 // 0 }}", "{% if %}"])
def test_a_template_with_a_fault_of_its_own_is_named(template: str) -> None:
    with pytest.raises(ConfigError, match="line 1: the model's chat template refuses the messages: ") as caught:
        render(messages(), make_tokenizer(template=template), DataConfig())
    assert caught.value.param == "training_file"


def test_a_template_that_leaves_a_message_out_is_refused() -> None:
    """Otherwise the system prompt would be ignored without a word, and rows would share one prompt."""
    no_system = make_tokenizer(template="{% for m in messages if m.role == 'user' %}user : {{ m.content }} {% endfor %}assistant :")
    with pytest.raises(ConfigError, match=r"line 1: .* leaves out message 1, from 'system'; .*data\.system_prompt"):
        render(messages(), no_system, DataConfig(system_prompt="be brief"))
    with pytest.raises(ConfigError, match=r"leaves out message 1, from 'user'"):
        render(messages(), make_tokenizer(template="user : assistant :"), DataConfig())
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "brief"}, {"role": "user", "content": "world"}]
    assert render(Row(1, turns, None, {}), no_system, DataConfig())[0] == "user : hello user : world assistant :"


def test_a_template_may_rewrite_what_it_reads() -> None:
    shouting = make_tokenizer(template="user : {{ messages[0].content | trim | replace('/no_think', '') }} assistant :")
    assert render(messages(" hello /no_think"), shouting, DataConfig())[0] == "user : hello  assistant :"


def test_text_without_the_template_is_counted_unless_it_is_meant() -> None:
    rows = [plain("hello"), messages(), plain("world")]
    assert num_untemplated(rows, make_tokenizer(), DataConfig()) == 2
    assert num_untemplated(rows, make_tokenizer(), DataConfig(prompt_as="text")) == 0
    assert num_untemplated(rows, make_tokenizer(), DataConfig(chat_template="none")) == 0
    assert num_untemplated(rows, make_tokenizer(template=None), DataConfig()) == 0


def test_long_prompts_are_skipped_and_counted() -> None:
    rows = [plain("hello"), plain("hello world hello world"), plain("world")]
    prompts, skipped = make_prompts(rows, make_tokenizer(), DataConfig(), context_length=8, max_completion_tokens=4)
    assert skipped == 1
    assert [prompt.row for prompt in prompts] == [0, 2]
    assert make_prompts(rows, make_tokenizer(), DataConfig(), context_length=9, max_completion_tokens=4)[1] == 0
    assert make_prompts(rows, make_tokenizer(), DataConfig(max_prompt_tokens=4), context_length=99, max_completion_tokens=4)[1] == 1


@pytest.mark.parametrize(("context_length", "param"), [(4, "method.grpo.sampling.max_completion_tokens"), (5, "training_file")])
def test_no_room_at_all_is_a_config_error(context_length: int, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_prompts([plain("hello world")], make_tokenizer(), DataConfig(), context_length=context_length, max_completion_tokens=4)
    assert caught.value.param == param


def dataset(count: int, seed: int = 1, *, should_shuffle: bool = True) -> Dataset:
    return Dataset([Prompt(row, str(row), [row], {}) for row in range(count)], seed, should_shuffle=should_shuffle)


@given(count=st.integers(1, 20), takes=st.lists(st.integers(1, 7), min_size=1, max_size=12), cut=st.integers(0, 11))
def test_a_cursor_continues_the_order_exactly(count: int, takes: list[int], cut: int) -> None:
    whole, first, second = dataset(count), dataset(count), dataset(count)
    expected = [prompt.row for size in takes for prompt in whole.take(size)]
    got = [prompt.row for size in takes[:cut] for prompt in first.take(size)]
    second.seek(first.cursor())
    got += [prompt.row for size in takes[cut:] for prompt in second.take(size)]
    assert got == expected
    for start in range(0, len(expected) - count + 1, count):
        assert sorted(expected[start : start + count]) == list(range(count)), "each prompt once per epoch"


def test_epochs_and_seeds_have_orders_of_their_own_and_no_shuffle_keeps_the_file() -> None:
    data = dataset(30)
    first, second = data.take(30), data.take(30)
    assert [prompt.row for prompt in first] != [prompt.row for prompt in second]
    assert [prompt.row for prompt in dataset(30, seed=2).take(30)] != [prompt.row for prompt in first]
    assert [prompt.row for prompt in dataset(5, should_shuffle=False).take(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_a_cursor_of_another_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="same file"):
        dataset(4).seek(dataset(5).cursor())
