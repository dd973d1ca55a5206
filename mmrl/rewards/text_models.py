"""Loading of transformers text models for rewards, and the reward `reward_model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.plain_text import PlainText
from mmrl.core.types import Outcome, Prompt
from mmrl.runtime.modules import reward_device
from mmrl.runtime.weights import load_whole


def load_text_model(kind: str, model: str, device: str = "auto", **options: Any) -> tuple[Any, Any]:
    """Load a tokenizer and a frozen model from safetensors.

    Args:
        kind: Name of a class of transformers, such as `AutoModel`.
        model: Folder or name of the model.
        device: Torch device; `auto` is the current GPU, or the CPU.
        options: Further arguments of `from_pretrained`.
    """
    import transformers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    loaded = load_whole(getattr(transformers, kind), model, trust_remote_code=False, **options)
    return tokenizer, loaded.to(reward_device(device)).eval().requires_grad_(False)


@reward
class RewardModel:
    """Score answers with a text reward model: a sequence classifier, as TRL trains it.

    The score is the logit. The model reads the texts of the prompt's messages and the answer, in its own chat
    template if it has one, otherwise concatenated. It gets no images or videos: `vision.reward_model` reads
    them. If rule-based rewards are added, as in Skywork R1V2 (arXiv 2504.16656),
    choose the weight by the spread of the scores: see the metric `rewards/reward_model/std`.

    Args:
        model: Folder or name of the model, in safetensors.
        of: Label of the classifier whose logit is the score; empty: its only label.
        max_length: Maximum tokens of prompt and answer; longer texts lose their beginning.
        batch_size: Answers per forward pass.
        device: Torch device; `auto` is the current GPU, or the CPU.
    """

    def __init__(
        self,
        *,
        model: str,
        of: str = "",
        max_length: PositiveInt = 2048,
        batch_size: PositiveInt = 16,
        device: str = "auto",
    ) -> None:
        self.tokenizer, self.model = load_text_model("AutoModelForSequenceClassification", model, device)
        config = self.model.config
        if getattr(config, "vision_config", None):
            raise ValueError(f"'{model}' also reads images or videos; name it as `vision.reward_model`")
        names = [config.id2label[number] for number in range(config.num_labels)]
        if of not in (names if len(names) > 1 else ("", *names)):
            raise ValueError(f"'{model}' has the labels {', '.join(names)}; set `of` to one, not '{of}'")
        self.column = names.index(of) if of else 0
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.tokenizer.truncation_side, self.tokenizer.padding_side = "left", "right"
        self.max_length, self.batch_size = max_length, batch_size
        self.plain = PlainText(self.tokenizer)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Return the score of every answer."""
        texts = [self._text(*both) for both in zip(prompts, outcomes, strict=True)]
        scores: list[float] = []
        for at in range(0, len(texts), self.batch_size):
            batch = self.plain.tokenizer(
                texts[at : at + self.batch_size],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                add_special_tokens=self.tokenizer.chat_template is None,  # chat templates add their own
                return_tensors="pt",
            ).to(self.model.device)
            scores += self.model(**batch).logits[:, self.column].float().tolist()
        return scores

    def _text(self, prompt: Prompt, outcome: Outcome) -> str:
        """Format prompt and answer as the input text of the model."""
        answer = outcome.text or ""
        if self.tokenizer.chat_template is None:
            return self.plain.settled(self.plain.marked(prompt.text + answer))
        turns = []
        for turn in prompt.messages:
            words = "\n".join(part.text for part in turn.parts if part.text)
            turns.append({**turn.keys, "role": turn.role, "content": words})
        turns.append({"role": "assistant", "content": answer})
        written = self.tokenizer.apply_chat_template(self.plain.marked(turns), tokenize=False)
        return self.plain.settled(written)
