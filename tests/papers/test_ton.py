"""TON: thoughts that are dropped or empty."""

from __future__ import annotations

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.papers.ton import skip_ratio
from mmrl.rewards.text import tag_format


def asked(target="", **columns):
    return Prompt("p", (Message("user", (Part("why"),)),), target=target, columns=columns)


def measure(reward, *texts, prompt=None, **options):
    """Measure texts as answers to one prompt."""
    prompt = prompt or asked()
    return reward([prompt] * len(texts), [Outcome(text=text) for text in texts], **options)


def test_skip_ratio_counts_thoughts_of_nothing_but_space():
    empty, thought = "<think>\n\n</think><answer>3</answer>", "<think>I see 3</think><answer>3</answer>"
    assert measure(skip_ratio, empty, "<THINK></think>3", thought) == [1, 1, 0]
    assert measure(skip_ratio, "3", "<think></think><think>so</think>3", "<think> 3", "") == [0, 0, 0, 0]
    assert measure(skip_ratio, "<why> </why>", thought, tag="why") == [1, 0]


def test_an_empty_thought_has_the_format_and_is_skipped():
    text = "<think>\n\n</think>\n<answer>3</answer>"
    assert measure(tag_format, text) == measure(skip_ratio, text) == [1]


SHOWN = "<think>it is {}</think><answer>{}</answer>"


def rows(*, count: int = 200, form: str = SHOWN):
    """Make rows with a demonstration each."""
    return [Prompt(f"r{i}", (), str(i), (Outcome(form.format(i, i)),), {"n": i}) for i in range(count)]


def made(name, seed=0, **options):
    return Pieces(Stream(seed)).prompts(Piece(name, options), "data")


def inner(**options):
    return {"name": f"{__name__}:rows", **options}


def skipped(prompts):
    return {p.uid for p in prompts if p.answers[0].text.startswith("<think>\n\n</think>")}


def test_half_of_the_thoughts_are_dropped_and_nothing_else():
    prompts = made("drop_thoughts", data=inner())
    empty = skipped(prompts)
    assert 70 < len(empty) < 130  # 200 coins: 100 with a deviation of 7
    for prompt in prompts:
        thought = "\n\n" if prompt.uid in empty else f"it is {prompt.target}"
        assert prompt.answers[0].text == f"<think>{thought}</think><answer>{prompt.target}</answer>"


def test_the_draw_is_of_the_row_and_the_seed():
    whole, part = (skipped(made("drop_thoughts", data=inner(count=n))) for n in (200, 20))
    assert part == {uid for uid in whole if int(uid[1:]) < 20}
    assert skipped(made("drop_thoughts", data=inner())) == whole
    assert skipped(made("drop_thoughts", seed=1, data=inner())) != whole


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1.0, 200)])
def test_none_or_all_may_be_dropped(share, count):
    assert len(skipped(made("drop_thoughts", data=inner(), share=share))) == count


def test_other_tags_and_only_the_first_block():
    prompts = made("drop_thoughts", data=inner(form="<why>a</why><why>{}</why>{}"), share=1.0, tag="why")
    assert prompts[3].answers[0].text == "<why>\n\n</why><why>3</why>3"


def test_data_without_thoughts_are_an_error():
    with pytest.raises(ConfigError, match="found no demonstration with a block <think> in 200 rows"):
        made("drop_thoughts", data=inner(form="{}{}"))
