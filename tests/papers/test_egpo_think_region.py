"""Which tokens of an answer are noted as its thought."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mmrl.core.types import Outcome
from mmrl.papers.egpo import WithAnswerRegion, WithThinkRegion
from tests.vision import mixed

FAMILY = "qwen2_5_vl"


def thought(policy, text, region=WithThinkRegion, **tags) -> str:
    """Answer with a text, and put the tokens of its thought, or of another region, together."""
    row = policy.encode(mixed.prompts(FAMILY)[0], Outcome(text=text))
    engine = SimpleNamespace(policy=policy, rollout=lambda prompts: (row,))
    (noted,) = region(engine, **tags).rollout([row.prompt])
    think = noted.notes["answer" if region is WithAnswerRegion else "think"]
    assert think.shape == row.steps.ids.shape and set(think.tolist()) <= {0.0, 1.0}
    return policy.prompt_encoder.text(row.steps.ids[think > 0])


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("so <think>0 to 12</think> 34", "0 to 12"),
        ("0 to 12</think> 34", "0 to 12"),  # the prompt opened it
        ("<think>0 to 12", "0 to 12"),  # cut
        ("0 to 12", ""),
        ("<think></think> 34", ""),
    ],
)
def test_a_thought_is_what_stands_between_its_tags(exact, answer, wanted):
    assert thought(exact(FAMILY), answer).strip() == wanted


def test_other_tags_mark_other_regions(exact):
    assert thought(exact(FAMILY), "0 [1 to 2] 3", open="[", close="]") == "1 to 2"


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("<answer>1</answer> no <answer>2 to 3</answer> 4", "2 to 3"),  # the last one counts
        ("1 <answer>2", "2"),  # cut
        ("1 to 2</answer>", ""),
    ],
)
def test_the_answer_is_what_stands_between_the_last_tags(exact, answer, wanted):
    assert thought(exact(FAMILY), answer, WithAnswerRegion).strip() == wanted
