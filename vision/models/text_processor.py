"""What a tokenizer lacks to stand where the processor of a vision-language model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TextProcessor:
    """The processor of a model that reads text only: a tokenizer that joins the parts of a message.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
    """

    image_processor = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render messages of parts; raises ValueError where one of the parts is not text."""
        seen = next((part["type"] for m in messages for part in m["content"] if part["type"] != "text"), "")
        if seen:
            raise ValueError(
                f"the prompt shows an {seen}, but this model reads text only; name a vision-language model, "
                "or rows without media"
            )
        joined = [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]
        return self.tokenizer.apply_chat_template(joined, **options)

    def __call__(
        self, *, text: list[str], return_tensors: str, text_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        # The template has written the special tokens.
        options = {"add_special_tokens": False, **(text_kwargs or {})}
        inputs = self.tokenizer(text, return_tensors=return_tensors, **options)
        return {"input_ids": inputs["input_ids"]}

    def save_pretrained(self, folder: str) -> None:
        """Write the tokenizer's files."""
        self.tokenizer.save_pretrained(folder)
