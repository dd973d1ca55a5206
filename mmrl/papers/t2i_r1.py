"""T2I-R1 (arXiv 2505.00703): a text that plans an image, then its tokens, learned together from one reward.

Title: T2I-R1: Reinforcing Image Generation with Collaborative Semantic-level and Token-level CoT
Formula: A_i = (R_i - mean R) / std R over the images of a prompt, the same for all tokens of plan and
image; the loss is the mean over all these tokens, with 0.01 KL. R_i is the sum of an ensemble of rewards.
Our reading: the image follows the plan in one conversation. The authors' code writes the image in a second
conversation, after the caption and the plan without the instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from mmrl.config.loading import ConfigError
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import CHANGED, Message, Part, Prompt, Rollouts

PLACE = "{prompt}"


@engine(scope="vision", sets_tags={CHANGED})
@dataclass(eq=False)
class WithPlans:
    """Ask for a plan of the image before the image (T2I-R1, arXiv 2505.00703).

    The wrapped engine, `vision.generate_images` with a `max_text_length`, reads the instruction in place of
    the last message. Rewards see the prompt without it.

    Args:
        engine: The wrapped engine.
        instruction: Text with `{prompt}` in place of the prompt's last message.
    """

    engine: Engine
    _: KW_ONLY
    instruction: str = (
        "Describe all objects of this image with their look, number and place, then draw it: {prompt}"
    )
    notes: ClassVar[frozenset[str]] = frozenset()  # all rows have the notes of the wrapped engine
    makes: ClassVar[str] = "images"

    def __post_init__(self) -> None:
        self.policy = self.engine.policy
        if PLACE not in self.instruction:
            raise ConfigError(f"`instruction` of `vision.with_plans` has no {PLACE}: {self.instruction!r}")
        if getattr(self.engine, "max_text_length", 1) == 0:
            raise ConfigError(
                "`vision.with_plans` needs a `max_text_length` of the engine before it, for plans"
            )

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Write plans and images; the rows have the prompts as they were."""
        given = {prompt.uid: prompt for prompt in prompts}
        asked = {uid: self._asked(prompt) for uid, prompt in given.items()}
        rows = self.engine.rollout([asked[prompt.uid] for prompt in prompts])
        return tuple(replace(row, prompt=given[row.prompt.uid]) for row in rows)

    def _asked(self, prompt: Prompt) -> Prompt:
        """Replace the text of the last message by the instruction; its media stay before it."""
        last = prompt.messages[-1]
        media = tuple(part for part in last.parts if part.media is not None)
        text = self.instruction.replace(PLACE, last.text)
        return replace(prompt, messages=(*prompt.messages[:-1], Message(last.role, (*media, Part(text)))))
