"""PS-GRPO (arXiv 2510.04392): answers earn agreement with answers to other wordings of the question.

Title: Improving Consistency in Retrieval-Augmented Systems with Group Similarity Rewards
Formula: reward_i = mean of similarity(y_i, y_j) over the answers j to other wordings.
Our reading: the mean over all other answers, and the number of wordings; only the abstract was read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat
from mmrl.config.registry import reward, sampler
from mmrl.core.answer_text import answer_part
from mmrl.core.answers import exact_text, word_f1
from mmrl.core.protocols import Sampler
from mmrl.core.types import Outcome, Part, Prompt
from mmrl.rewards.adapters import comparable_outcomes

ORDER = 4  # longest n-grams of BLEU


@reward
def agreement(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    similarity: Literal["bleu", "f1", "equal"] = "bleu",
    tag: str = "answer",
) -> list[float | None]:
    """Return the mean similarity to the answers to other wordings of the question (PS-GRPO).

    Con-RAG, arXiv 2510.04392, of which only the abstract was read; the formula is our reading: the mean over
    all answers to other wordings. The sampler `with_wordings` asks one prompt in several wordings, so that
    its answers are one group. None where all answers of the group are to one wording.

    Args:
        similarity: `bleu` of the answer with the other one as reference, up to 4-grams, each precision above
            1-grams with 1 added to both counts; `f1` of words; or `equal`, 1 where both are the same text.
        tag: Compare the last block of this tag; without one the whole text.
    """
    measure = SIMILARITIES[similarity]
    texts = [exact_text(answer_part(outcome.text or "", tag)) for outcome in outcomes]
    rewards: list[float | None] = [None] * len(outcomes)
    for members in comparable_outcomes(prompts):
        for i, others in _other_wordings(prompts, members).items():
            if others:
                rewards[i] = sum(measure(texts[i], texts[j]) for j in others) / len(others)
    return rewards


@reward
def information_consistency(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    alpha: NonNegativeFloat = 0.5,
    beta: NonNegativeFloat = 0.5,
    max_gap: PositiveFloat | None = None,
) -> list[float | None]:
    """Reward answers that carry much information, and the same to every wording of the question.

    Information-consistent GRPO. With H the entropy of an answer's words, in nats: alpha times H scaled to [0,
    1] over the group, plus beta times 1 - the mean |H - H'| / max_gap over the answers H' to other wordings,
    at least 0. Our readings: alpha and beta, words for tokens, and the largest gap of the group where none is
    given. The sampler `with_wordings` asks the wordings. None where all answers of the group are to one.

    Args:
        alpha: Weight of the information of the answer itself.
        beta: Weight of its stability.
        max_gap: Difference of entropies at which stability is 0, in nats; null: the largest of the group.
    """
    entropy = [word_entropy(outcome.text or "") for outcome in outcomes]
    rewards: list[float | None] = [None] * len(outcomes)
    for members in comparable_outcomes(prompts):
        found = [entropy[i] for i in members]
        low, spread = min(found), max(found) - min(found)
        others = _other_wordings(prompts, members)
        gaps = {i: [abs(entropy[i] - entropy[j]) for j in apart] for i, apart in others.items() if apart}
        largest = max_gap or max((gap for listed in gaps.values() for gap in listed), default=0.0)
        for i, listed in gaps.items():
            helpful = (entropy[i] - low) / spread if spread else 0.0
            stable = 1 - sum(listed) / len(listed) / largest if largest else 1.0
            rewards[i] = alpha * helpful + beta * max(stable, 0.0)
    return rewards


def word_entropy(text: str) -> float:
    """Compute the entropy of the frequencies of a text's words, in nats; 0 for an empty text."""
    counts = Counter(text.lower().split())
    return sum(n / counts.total() * math.log(counts.total() / n) for n in counts.values())


def bleu(text: str, reference: str) -> float:
    """Compute the BLEU of two texts of words (Papineni et al. 2002), smoothed by 1 above 1-grams."""
    words, wanted = text.split(), reference.split()
    if not words or not wanted:
        return float(words == wanted)
    logs = []
    for n in range(1, min(ORDER, len(words)) + 1):
        found, there = (
            Counter(zip(*(listed[i:] for i in range(n)), strict=False)) for listed in (words, wanted)
        )
        shared, smooth = (found & there).total(), float(n > 1)
        if not shared + smooth:
            return 0.0
        logs.append(math.log((shared + smooth) / (found.total() + smooth)))
    brevity = min(0.0, 1 - len(wanted) / len(words))
    return math.exp(brevity + sum(logs) / len(logs))


SIMILARITIES: Mapping[str, Callable[[str, str], float]] = {
    "bleu": bleu,
    "f1": word_f1,
    "equal": lambda text, other: float(text == other),
}


def _other_wordings(prompts: Sequence[Prompt], members: Sequence[int]) -> dict[int, list[int]]:
    """List for every answer of a group the answers to other wordings of the question."""
    return {i: [j for j in members if prompts[j].text != prompts[i].text] for i in members}


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
