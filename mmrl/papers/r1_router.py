"""Rewards of stepwise retrieval: the next sub-question with its source, and the answer in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome, tagged
from mmrl.core.answers import words_of
from mmrl.core.plain_text import PlainText
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.answers import own_block
from mmrl.rewards.text_models import load_text_model

NO_RETRIEVER = "none"
SHORT = 5  # words of an answer of which every one is wanted


@reward
class RouteReward:
    """Reward the next retrieval step: half for the sub-question, half for the retriever (R1-Router).

    arXiv 2505.22095. The answer has the blocks `think`, `sub-question` and `ret`, and the target is
    `{"query": ..., "retriever": [...]}`, as `vision.stepwise` reads it. The reward is 0.5 times the cosine of
    the embeddings of both sub-questions, plus 0.5 if exactly one retriever is named and it is the target's
    first. A missing block, an unknown retriever or `none` beside another gives 0; a prompt with another
    target None. Case does not matter.

    Args:
        model: Model of transformers that embeds sub-questions, in safetensors.
        retrievers: The retrievers that may be named, besides `none`.
        pooling: How a text becomes one vector: `cls` takes the first token's, as BGE-M3's dense vectors do,
            `mean` the mean over tokens.
        max_length: Most tokens of a sub-question; longer ones are cut.
        batch_size: Sub-questions that are embedded at once.
        device: Torch device; `auto` is the current GPU, or the CPU.
    """

    def __init__(
        self,
        *,
        model: str = "BAAI/bge-m3",
        retrievers: tuple[str, ...] = ("text retriever", "text image retriever", "table retriever"),
        pooling: Literal["cls", "mean"] = "cls",
        max_length: PositiveInt = 1024,
        batch_size: PositiveInt = 12,
        device: str = "auto",
    ) -> None:
        self.tokenizer, self.model = load_text_model("AutoModel", model, device)
        self.allowed = {NO_RETRIEVER, *(name.lower() for name in retrievers)}
        self.plain = PlainText(self.tokenizer)
        self.pooling, self.max_length, self.batch_size = pooling, max_length, batch_size

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome; None where the target is no retrieval step."""
        targets = [_target(prompt) for prompt in prompts]
        steps = [self._step(outcome.text or "") for outcome in outcomes]
        read = [(step[0], target[0]) for step, target in zip(steps, targets, strict=True) if step and target]
        texts = list(dict.fromkeys(text for both in read for text in both))
        vectors = dict(zip(texts, self.embed(texts), strict=True)) if texts else {}
        rewards: list[float | None] = []
        for step, target in zip(steps, targets, strict=True):
            if target is None or step is None:
                rewards.append(None if target is None else 0.0)
                continue
            cosine = float(vectors[step[0]] @ vectors[target[0]])
            rewards.append(0.5 * cosine + 0.5 * (step[1] == target[1][:1]))
        return rewards

    def _step(self, text: str) -> tuple[str, list[str]] | None:
        """Parse a step into its sub-question and its retrievers; None where it is not well formed."""
        text = text.lower()
        blocks = [tagged(text, tag) for tag in ("think", "sub-question", "ret")]
        if not all(blocks):
            return None
        _, query, named = (found[0].strip() for found in blocks)
        retrievers = [name.strip() for name in named.split(",")]
        alone = len(retrievers) == 1 or NO_RETRIEVER not in retrievers
        return (query, retrievers) if alone and self.allowed.issuperset(retrievers) else None

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Embed texts as unit vectors: (number of texts, width)."""
        vectors = []
        for at in range(0, len(texts), self.batch_size):
            batch = self.plain.batch(
                texts[at : at + self.batch_size],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="pt",
            ).to(self.model.device)
            states = self.model(**batch).last_hidden_state.float()  # (n, T, width)
            mask = batch["attention_mask"][..., None].to(states)
            mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
            vectors.append(torch.nn.functional.normalize(states[:, 0] if self.pooling == "cls" else mean))
        return torch.cat(vectors).cpu()


def _target(prompt: Prompt) -> tuple[str, list[str]] | None:
    match prompt.target:
        case {"query": str(query), "retriever": [*retrievers]}:
            return query.lower().strip(), [str(name).lower().strip() for name in retrievers]
    return None


@reward(own_answer=own_block)
@per_outcome
def answer_recall(prompt: Prompt, outcome: Outcome) -> float | None:
    """Measure the recall of an answer's words, as R1-Router scores final steps (arXiv 2505.22095).

    The answer has the blocks `think` and `answer`; without one it earns 0. Of several targets that of the
    best F1 counts. A single target of more than 5 words earns its recall; a shorter one, and several, earn 1
    for full recall and else 0. Words are compared without case, articles and punctuation, with numbers up to
    ten in digits: our reading of a longer normalisation. None where the target is no text.
    """
    match prompt.target:
        case str() as target:
            targets = [target]
        case [str(), *_] as several:
            targets = list(several)
        case _:
            return None
    thoughts, answers = (tagged(outcome.text or "", tag) for tag in ("think", "answer"))
    if not thoughts or not answers:
        return 0.0
    _, recall = max((_f1_and_recall(answers[0], target) for target in targets), key=lambda both: both[0])
    if len(targets) == 1 and len(targets[0].split()) > SHORT:
        return recall
    return float(recall == 1)


def _f1_and_recall(answer: str, target: str) -> tuple[float, float]:
    words, wanted = words_of(answer), words_of(target)
    shared = (Counter(words) & Counter(wanted)).total()
    return (2 * shared / (len(words) + len(wanted)), shared / len(wanted)) if shared else (0.0, 0.0)
