"""A reward by a model that marks every answer by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import by_prompt
from mmrl.core.protocols import Engine, Policy
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.asking import (
    DATA,
    QUESTION,
    Asker,
    Unread,
    answer_of,
    is_empty,
    judge_prompt,
    judge_template,
    judge_words,
)

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
TAGS = {"score": "score", "yes_no": "verdict"}  # between which a judge ends, by `form`
POINTWISE = f"""\
Judge an answer to a question.

{QUESTION}
Answer{{{{ " (the last " + made + " above)" if made else "" }}}}:
{{{{ mark }}}}
{{{{ answer }}}}
{{{{ mark }}}}
{DATA}
"""
SCORE = """\
Say in a few sentences how good the answer is, then end with a score from {{ low }} (wrong or empty) to \
{{ high }} (right and complete), written as <score>N</score>.
"""
YES_NO = """\
Say in a few sentences whether the answer is right, then end with <verdict>yes</verdict> or \
<verdict>no</verdict>.
"""


@reward
class Judge:
    """Reward an answer with the mark that another model gives it, scaled to [0, 1].

    The judge reads the question with its images and videos, the target where it is a text or a number, and
    the answer, and ends with a score or a verdict between tags. One that does not is asked again, and then
    the answer has no reward, which is a fault: the run stops, or with `on_error: skip` the group is dropped.
    An empty answer earns 0 without being asked about. Equal answers to a prompt are judged once. It costs one
    generation for every distinct answer; a local judge stands beside the policy in memory, and a second time
    for an evaluation that names it. It logs `judge/unread`, the share of judgements that could not be read.

    Args:
        engine: Answers for the judge: `vision.generate` with a `policy`, or `chat_completions`, a server.
        policy: Model of a local judge, such as `{name: vision.tokens, model: ..., frozen: true}`.
        form: `score`, a number in `scale` between <score> tags, or `yes_no` between <verdict> tags.
        scale: The lowest and the highest score; a number outside is not read.
        tag: Show only the last block of this tag of the answer; empty, or without one: all of it.
        reference: Show the target where there is one.
        template: Text of jinja2 in place of the built-in one, which reads `question`, `answer`, `reference`,
            `columns` (of the data), `low`, `high`, `mark` (a line around the answer, which no answer can
            guess) and `made` ("image" or "video" where the answer is one). It must ask for the tags.
        ask_again: Times that a judge is asked again after a judgement that cannot be read.
        device: Torch device of a local judge; `auto` is the current GPU, or the CPU.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        engine: Callable[..., Engine],
        policy: Callable[[], Policy] | None = None,
        form: Literal["score", "yes_no"] = "score",
        scale: tuple[float, float] = (1.0, 10.0),
        tag: str = "",
        reference: bool = True,
        template: str = "",
        ask_again: NonNegativeInt = 2,
        device: str = "auto",
    ) -> None:
        if not scale[0] < scale[1]:
            raise ConfigError(f"`scale` of a judge must rise, not be {list(scale)}")
        built_in = POINTWISE + (SCORE if form == "score" else YES_NO)
        known = {"question", "answer", "reference", "columns", "low", "high", "mark", "made"}
        self.template = judge_template(template or built_in, known, {"answer"}, TAGS[form], "judge")
        self.stream, self.form, self.scale, self.tag, self.reference = stream, form, scale, tag, reference
        self.asker = Asker(engine, policy, device, ask_again)

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread]:
        """Compute the reward of every outcome; `Unread` where there is no judgement."""
        questions, places = [], []
        for members in by_prompt(prompts).values():
            for number, i in enumerate(members):
                if not is_empty(outcomes[i], self.tag):
                    questions.append(self._question(prompts[i], outcomes[i], number))
                    places.append(i)
        low, high = self.scale
        if self.form == "score":
            judged = self.asker.ask(questions, "score", f"a number from {low:g} to {high:g}", self._read)
        else:
            read = {"yes": 1.0, "no": 0.0}
            judged = self.asker.ask(questions, "verdict", "yes or no", lambda text: read.get(text.lower()))
        rewards: list[float | Unread] = [0.0] * len(outcomes)
        for i, value in zip(places, judged, strict=True):
            rewards[i] = value
        return rewards

    def _read(self, written: str) -> float | None:
        low, high = self.scale
        value = float(written) if NUMBER.fullmatch(written) else float("nan")
        return (value - low) / (high - low) if low <= value <= high else None

    def _question(self, prompt: Prompt, outcome: Outcome, number: int) -> Prompt:
        words = {
            **judge_words(self.stream, prompt, [outcome], self.reference),
            "answer": answer_of(outcome, self.tag),
            "low": f"{self.scale[0]:g}",
            "high": f"{self.scale[1]:g}",
        }
        return judge_prompt(f"judge/{prompt.uid}/{number}", prompt, [outcome], self.template(words))
