"""A sampler that asks the same question in several wordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmrl.config.loading import ConfigError
from mmrl.config.registry import sampler
from mmrl.core.protocols import Sampler
from mmrl.core.types import Part, Prompt

TAG = "wording"  # of the outcomes of a prompt that is asked in other words: 1, 2, ...


@sampler(sets_tags={TAG})
class WithWordings:
    """Ask the rollouts of every prompt in turn in its own words and in paraphrases (PS-GRPO).

    arXiv 2510.04392. The id stays, so all answers are one group, which the rewards `agreement` and
    `information_consistency` compare across wordings; `by: [group, place, wording]` compares within one. A
    paraphrase takes the place of the question inside the prompt; a prompt without any is asked as it is.

    Args:
        sampler: The wrapped sampler.
        column: Column of the data with a list of paraphrases.
        question_column: Column with the question, as it stands in the prompt.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        train_prompts: Sequence[Prompt] = (),
        column: str = "paraphrases",
        question_column: str = "question",
    ) -> None:
        self.sampler, self.column, self.question_column = sampler, column, question_column
        most = max((len(wordings_of(prompt, column, question_column)) for prompt in train_prompts), default=1)
        if train_prompts and most == 1:
            columns = sorted({name for prompt in train_prompts for name in prompt.columns})
            raise ConfigError(
                f"'with_wordings': no prompt has paraphrases in the column '{column}'; the data have "
                f"{', '.join(columns) or 'no columns'}"
            )

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw prompts; the rollouts of one take turns among its wordings."""
        asked: dict[str, int] = {}
        entries = []
        for prompt in self.sampler.draw(num_prompts, num_generations):
            wordings = wordings_of(prompt, self.column, self.question_column)
            turn = asked.get(prompt.uid, 0)
            asked[prompt.uid] = turn + 1
            entries.append(wordings[turn % len(wordings)])
        return entries


def wordings_of(prompt: Prompt, column: str, question_column: str) -> list[Prompt]:
    """List a prompt and its paraphrases; raises ConfigError where these are no texts, or fit nowhere."""
    match prompt.columns.get(column):
        case None | [] | ():
            return [prompt]
        case [*texts] if all(isinstance(text, str) and text.strip() for text in texts):
            pass
        case value:
            raise ConfigError(
                f"'with_wordings': '{column}' of prompt '{prompt.uid}' must be a list of texts, not "
                f"{value!r:.80}"
            )
    question = prompt.columns.get(question_column)
    if not isinstance(question, str) or not question or question not in prompt.text:
        raise ConfigError(
            f"'with_wordings': the column '{question_column}' of prompt '{prompt.uid}' must hold the "
            f"question as it stands in the prompt, not {question!r:.80}"
        )
    return [prompt, *(_reworded(prompt, question, text, str(i)) for i, text in enumerate(texts, 1))]


def _reworded(prompt: Prompt, question: str, text: str, tag: str) -> Prompt:
    """Put a paraphrase in the place of the question."""

    def part(old: Part) -> Part:
        return replace(old, text=old.text.replace(question, text))

    messages = tuple(replace(turn, parts=tuple(map(part, turn.parts))) for turn in prompt.messages)
    return replace(prompt, messages=messages, tags={**prompt.tags, TAG: tag})
