"""One question in several wordings: turns, groups, and columns that do not fit."""

from __future__ import annotations

import pytest

from mmrl.config.loading import ConfigError
from mmrl.core.types import Message, Part, Prompt
from mmrl.papers.ps_grpo import WithWordings


def prompt(uid="p", **columns):
    parts = (Part("What is red?"), Part("\nAnswer briefly."))
    return Prompt(uid, (Message("system", (Part("You see."),)), Message("user", parts)), columns=columns)


class Draws:
    """A sampler that returns all prompts, one after the other."""

    def __init__(self, *prompts):
        self.prompts = prompts

    def draw(self, num_prompts, num_generations):
        return [prompt for prompt in self.prompts for _ in range(num_generations)]


ASKED = prompt(question="What is red?", paraphrases=["Which one is red?", "Name the red thing."])


def test_rollouts_take_turns_among_the_wordings_of_one_group():
    sampler = WithWordings(Draws(ASKED, prompt("q")), train_prompts=[ASKED, prompt("q")])
    drawn = sampler.draw(2, 5)
    assert [entry.uid for entry in drawn] == ["p"] * 5 + ["q"] * 5
    wordings = ["What is red?", "Which one is red?", "Name the red thing."]
    assert [entry.messages[1].parts[0].text for entry in drawn[:5]] == [*wordings, *wordings[:2]]
    assert [entry.tags.get("wording") for entry in drawn[:5]] == [None, "1", "2", None, "1"]
    assert (
        drawn[1].messages[0] == ASKED.messages[0]
        and drawn[1].messages[1].parts[1].text == "\nAnswer briefly."
    )
    assert drawn[5] == prompt("q") and drawn[0] == ASKED


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"paraphrases": "Which?", "question": "What is red?"}, "must be a list of texts, not 'Which"),
        ({"paraphrases": ["Which?", 3], "question": "What is red?"}, "must be a list of texts"),
        ({"paraphrases": ["Which?"]}, "must hold the question as it stands in the prompt, not None"),
        ({"paraphrases": ["Which?"], "question": "What is blue?"}, "must hold the question"),
        (
            {"question": "What is red?"},
            "no prompt has paraphrases in the column 'paraphrases'",
        ),
    ],
)
def test_a_column_that_does_not_fit_is_named_before_training(columns, message):
    with pytest.raises(ConfigError, match=message):
        WithWordings(Draws(), train_prompts=[prompt(**columns)])
