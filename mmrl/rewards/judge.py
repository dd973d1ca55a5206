"""The reward `judge`: a judge model scores each answer separately."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmrl.config.loading import ConfigError
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import log_metric
from mmrl.rewards.asking import (
    DATA,
    QUESTION,
    Judging,
    Unread,
    answer_of,
    is_empty,
    judge_prompt,
    judge_template,
    judge_words,
)
from mmrl.runtime.scoring import by_prompt

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
TAGS = {"score": "score", "yes_no": "verdict"}  # maps `form` to the tag of the verdict
YES, NO = (tuple(a + b for a in ("", " ") for b in (w, w.title(), w.upper())) for w in ("yes", "no"))
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
# Questions for the forms that read the probabilities of the judge's first word.
P_YES = "Is the answer right? Say yes or no, and nothing else.\n"
EXPECTED = """\
How good is the answer? Say a number from {{ low }} (wrong or empty) to {{ high }} (right and complete), and \
nothing else.
"""
ASKS = {"score": SCORE, "yes_no": YES_NO, "p_yes": P_YES, "p_yes_of_all": P_YES, "expected_score": EXPECTED}


@reward
@dataclass(kw_only=True, eq=False)
class Judge(Judging):
    """Reward an answer with the score that another model gives it, scaled to [0, 1].

    The judge reads the question with its images and videos, the target if it is a text or a number, and the
    answer; its reply ends with a score or a verdict between tags. If a reply cannot be parsed after
    `ask_again` repetitions, the reward fails: the run stops, or with `on_error: skip` the group is dropped.
    An empty answer gets 0 without asking the judge. The cost is one generation for every distinct answer of a
    prompt. A local judge needs memory besides the policy, and twice as much if evaluations use it too. The
    metric `judge/unread` is the fraction of replies that could not be parsed.

    Three forms read the probabilities of the judge's first word instead, at the cost of one forward pass.
    Their metric `judge/mass` is the total probability of the expected words; it is low for a judge that would
    not answer in this form.

    Args:
        engine: Generates the judge's replies: `vision.generate` or `vision.vllm` with a `policy`, or the
            server `chat_completions`.
        policy: Model of a local judge, such as `{name: vision.tokens, model: ..., frozen: true}`.
        form: `score`: a number in `scale` between <score> tags. `yes_no`: yes or no between <verdict> tags.
            Without tags: `p_yes`: P(yes) / (P(yes) + P(no)). `p_yes_of_all`: P(yes) among all words
            (Nemotron-Cascade, arXiv 2512.13607). `expected_score`: the mean of the whole numbers of `scale`,
            weighted by their probabilities; each must be one token.
        scale: The lowest and the highest score; a number outside counts as not parsed.
        tag: Show the judge only the last block of this tag in the answer. It sees the whole answer if `tag`
            is empty or the answer has no such block.
        reference: Show the judge the target, if there is one.
        template: jinja2 template that replaces the built-in template. It can read `question`, `answer`,
            `reference`, `columns` (of the data), `low`, `high`, `mark` (a random line to put before and after
            the answer: no answer can fake it) and `made` ("image" or "video" if the answer is one). The
            template must ask for the tags of `form`.
        ask_again: Repetitions of a question after a reply that cannot be parsed.
        device: Torch device of a local judge; `auto` is the current GPU, or the CPU.
    """

    form: Literal["score", "yes_no", "p_yes", "p_yes_of_all", "expected_score"] = "score"
    scale: tuple[float, float] = (1.0, 10.0)
    template: str = ""

    def __post_init__(self) -> None:
        if not self.scale[0] < self.scale[1]:
            raise ConfigError(f"`scale` of a judge must rise, not be {list(self.scale)}")
        variables = {"question", "answer", "reference", "columns", "low", "high", "mark", "made"}
        source, tag = self.template or POINTWISE + ASKS[self.form], TAGS.get(self.form, "")
        self.question = judge_template(source, variables, {"answer"}, tag, "judge")
        self.asker = self.make_asker()
        self.words: list[tuple[str, ...]] = [YES, NO]  # first words of a reply whose probabilities are read
        self.marks = [1.0, 0.0]  # scores of `words`
        if self.form == "expected_score":
            low, high = self.scale
            numbers = range(math.ceil(low), math.floor(high) + 1)
            self.words = [(str(n), f" {n}") for n in numbers]
            self.marks = [(n - low) / (high - low) for n in numbers]
        if self.form not in TAGS:
            self.asker.weigh((), self.words)  # raises if the first token cannot tell the words apart

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread]:
        """Compute the reward of every outcome, or `Unread` if the judgement cannot be parsed."""
        questions = {
            i: self._question(prompts[i], outcomes[i], number)
            for members in by_prompt(prompts).values()
            for number, i in enumerate(members)
            if not is_empty(outcomes[i], self.tag)
        }
        rewards: dict[int, float | Unread] = dict(
            zip(questions, self._judged([*questions.values()]), strict=True)
        )
        return [rewards.get(i, 0.0) for i in range(len(outcomes))]

    def _judged(self, questions: Sequence[Prompt]) -> Sequence[float | Unread]:
        """Ask every question and parse the judgements by `form`."""
        low, high = self.scale
        match self.form:
            case "score":
                return self.asker.ask(questions, "score", f"a number from {low:g} to {high:g}", self._read)
            case "yes_no":
                verdicts = {"yes": 1.0, "no": 0.0}
                return self.asker.ask(questions, "verdict", "yes or no", lambda t: verdicts.get(t.lower()))
        rewards: list[float | Unread] = []
        for weights in self.asker.weigh(questions, self.words):
            log_metric("judge/mass", sum(weights))
            mean = sum(w * mark for w, mark in zip(weights, self.marks, strict=True))
            if self.form == "p_yes_of_all":
                rewards.append(mean)
                continue
            # If all probabilities underflow to 0, there is no mean: count the reply as unparsed.
            wanted = f"{', '.join(words[0] for words in self.words)} with any probability"
            rewards.append(mean / sum(weights) if sum(weights) else Unread("", wanted))
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
        return judge_prompt(f"judge/{prompt.uid}/{number}", prompt, [outcome], self.question(words))
