"""Processor interface for language models, which have a tokenizer only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TextProcessor:
    """Wraps a tokenizer as the processor of a model that reads text only.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
    """

    image_processor = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Render or tokenize messages; raises ValueError if a part is not text."""
        blocks = [block for m in messages if not isinstance(m["content"], str) for block in m["content"]]
        seen = next((block["type"] for block in blocks if block["type"] != "text"), "")
        if seen:
            raise ValueError(
                f"the prompt shows an {seen}, but this model reads text only; name a vision-language model, "
                "or rows without media"
            )
        return self.tokenizer.apply_chat_template(messages, **options)

    def __call__(
        self, *, text: list[str], return_tensors: str, text_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        # The chat template has already added the special tokens.
        options = {"add_special_tokens": False, **(text_kwargs or {})}
        inputs = self.tokenizer(text, return_tensors=return_tensors, **options)
        return {"input_ids": inputs["input_ids"]}

    def save_pretrained(self, folder: str) -> None:
        """Write the tokenizer's files."""
        self.tokenizer.save_pretrained(folder)
