"""Text models of transformers that rewards ask: loading them, and one that scores answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.plain_text import PlainText
from mmrl.core.types import Outcome, Prompt
from mmrl.runtime.weights import load_whole


def load_text_model(kind: str, model: str, device: str = "auto", **options: Any) -> tuple[Any, Any]:
    """Load a tokenizer and a frozen model of transformers, such as `AutoModel`, from safetensors.

    `device` is one of torch, or `auto` for the current GPU, or the CPU. `options` are those of the model.
    """
    import transformers
    from transformers import AutoTokenizer

    if device == "auto":
        # With its number: rewards run in threads of their own, whose current device is another.
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    loaded = load_whole(getattr(transformers, kind), model, trust_remote_code=False, **options)
    return tokenizer, loaded.to(device).eval().requires_grad_(False)


@reward
class RewardModel:
    """Score answers with a reward model: a sequence classifier with one label, as TRL trains and takes.

    The score is its logit. It reads the texts of the prompt's messages and the answer, in its own chat
    template if it has one, else one after the other; images and videos are not shown to it (ask a model that
    sees them on another machine, by `http`). As one term beside rules, as in Skywork R1V2 (arXiv 2504.16656),
    its scale decides what it weighs: see `rewards/reward_model/std`.

    Args:
        model: Folder or name of the model, in safetensors.
        max_length: Most tokens of prompt and answer; what is longer loses its beginning.
        batch_size: Answers that are read at once.
        device: Torch device; `auto` is the current GPU, or the CPU.
    """

    def __init__(
        self,
        *,
        model: str,
        max_length: PositiveInt = 2048,
        batch_size: PositiveInt = 16,
        device: str = "auto",
    ) -> None:
        kind = "AutoModelForSequenceClassification"
        self.tokenizer, self.model = load_text_model(kind, model, device)
        labels = self.model.config.num_labels
        if labels != 1:
            raise ValueError(f"`reward_model` wants a model with one label, but '{model}' has {labels}")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.tokenizer.truncation_side, self.tokenizer.padding_side = "left", "right"
        self.max_length, self.batch_size = max_length, batch_size
        self.plain = PlainText(self.tokenizer)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the score of every answer."""
        texts = [self._text(*both) for both in zip(prompts, outcomes, strict=True)]
        scores: list[float] = []
        for at in range(0, len(texts), self.batch_size):
            batch = self.plain.tokenizer(
                texts[at : at + self.batch_size],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                add_special_tokens=self.tokenizer.chat_template is None,  # a template writes its own
                return_tensors="pt",
            ).to(self.model.device)
            scores += self.model(**batch).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Prompt, outcome: Outcome) -> str:
        """Write prompt and answer as the model reads them."""
        answer = outcome.text or ""
        if self.tokenizer.chat_template is None:
            return self.plain.settled(self.plain.marked(prompt.text + answer))
        turns = [
            {
                **turn.keys,
                "role": turn.role,
                "content": "\n".join(part.text for part in turn.parts if part.text),
            }
            for turn in prompt.messages
        ]
        turns.append({"role": "assistant", "content": answer})
        written = self.tokenizer.apply_chat_template(self.plain.marked(turns), tokenize=False)
        return self.plain.settled(written)
