"""Look-up of original prompts by their encoding, for teachers with another chat template."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from mmrl.core.types import Prompt
from mmrl.vision.models.chat_template import Tools

Encoded = TypeVar("Encoded")


class PromptSources:
    """Weak map from encoded prompts to the original prompts and their tools."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[Prompt, Tools | None]] = WeakKeyDictionary()

    def add(self, encoded: Encoded, prompt: Prompt, tools: Tools | None = None) -> Encoded:
        """Store the prompt and tools of an encoded prompt; return `encoded`. `tools` None: not known."""
        self._known.setdefault(encoded, (prompt, tools))
        return encoded

    def of(self, encoded: Any) -> tuple[Prompt, Tools | None]:
        """Return the prompt and tools of an encoded prompt; raise ValueError if they were not stored."""
        if encoded not in self._known:
            raise ValueError(f"the messages of prompt '{encoded.uid}' are not known, only its tokens")
        return self._known[encoded]
