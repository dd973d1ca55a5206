"""T2I-R1: a plan is asked for before the image, and rewards see the prompt without the instruction."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Trajectory
from mmrl.papers.t2i_r1 import WithPlans

SOURCE = Media("image", "source", lambda: Frames(None, None))
CAPTION = Prompt(
    "a",
    (Message("system", (Part("Be brief."),)), Message("user", (Part(media=SOURCE), Part("a {prompt} cat")))),
)
OTHER = Prompt("b", (Message("user", (Part("two dogs"),)),))


@dataclass
class Echo:
    """Answers every prompt by the text of its last message."""

    policy: object = None
    max_text_length: int = 8

    def rollout(self, prompts):
        return tuple(
            Trajectory(prompt, prompt.uid, (Outcome(prompt.messages[-1].text),), None, 1)
            for prompt in prompts
        )


def test_the_instruction_stands_around_the_last_message_and_rewards_see_the_prompt():
    rows = WithPlans(Echo(), instruction="plan {prompt}; draw {prompt}").rollout([CAPTION, OTHER, CAPTION])
    assert [row.outcomes[0].text for row in rows] == [
        "plan a {prompt} cat; draw a {prompt} cat", "plan two dogs; draw two dogs",
        "plan a {prompt} cat; draw a {prompt} cat",
    ]  # fmt: skip
    assert [row.prompt for row in rows] == [CAPTION, OTHER, CAPTION]
    asked = WithPlans(Echo())._asked(CAPTION)
    assert asked.messages[0] == CAPTION.messages[0] and asked.media == (SOURCE,)


@pytest.mark.parametrize(
    "engine, options, words",
    [
        (Echo(), {"instruction": "draw it"}, "has no {prompt}: 'draw it'"),
        (Echo(max_text_length=0), {}, "needs a `max_text_length`"),
    ],
)
def test_wrong_options_are_refused(engine, options, words):
    with pytest.raises(ConfigError, match=words):
        Pieces(Stream()).make("engine", Piece("vision.with_plans", options), engine)
