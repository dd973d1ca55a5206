"""Hints for questions: reading them from a column, and adding them to or removing them from prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmrl.config.schema import ConfigError
from mmrl.core.types import Part, Prompt

TAG = "hint"  # tag of the outcomes of a prompt with a hint
WANTED = "wanted_hint"  # tag of a prompt for which the engine `with_hinter` writes a hint
WROTE = "wrote"  # tag of an outcome that is a generated hint; answers given this hint have its value as `TAG`
ATTEMPT = "failed_attempt"  # column with the failed answer, if `WANTED` is set
TEMPLATE = "\n\nHint: {hint}"
SENTENCE_END = re.compile(r"(?<=[.!?。])\s+|\n+")


def with_hint(prompt: Prompt, hint: str, *, tag: str, template: str = TEMPLATE) -> Prompt:
    """Append a hint to the last message of a prompt; answers stay in the group of the prompt's id.

    Outcomes of the new prompt get the tag `hint` with the value `tag`; without a hint they lack this tag.
    """
    *before, last = prompt.messages
    last = replace(last, parts=(*last.parts, Part(template.replace("{hint}", hint), quoted=True)))
    return replace(prompt, messages=(*before, last), tags={**prompt.tags, TAG: tag})


def without_hint(prompt: Prompt) -> Prompt:
    """Remove the hint that `with_hint` added, if any."""
    if TAG not in prompt.tags:
        return prompt
    *before, last = prompt.messages
    tags = {name: value for name, value in prompt.tags.items() if name != TAG}
    return replace(prompt, messages=(*before, replace(last, parts=last.parts[:-1])), tags=tags)


def wanting_hint(prompt: Prompt, attempt: str, *, tag: str) -> Prompt:
    """Mark a prompt with the tag `WANTED` to request a hint, and store its failed answer in a column."""
    columns = {**prompt.columns, ATTEMPT: attempt}
    return replace(prompt, columns=columns, tags={**prompt.tags, WANTED: tag})


def sentences(text: str) -> list[str]:
    """Split a text at the ends of sentences and lines."""
    return [part for part in SENTENCE_END.split(text.strip()) if part]


def tiers(value: Any, cuts: int) -> list[str]:
    """List hints, weakest first: the texts of a list, or up to `cuts` prefixes of a text, shortest first."""
    match value:
        case str():
            parts = sentences(value)
            ends = [math.ceil(len(parts) * i / cuts) for i in range(1, cuts + 1)]
            return [" ".join(parts[:end]) for end in dict.fromkeys(ends) if end]
        case list() | tuple():
            return [hint for hint in value if hint]
    return []


def check_hints(prompts: Sequence[Prompt], column: str, template: str) -> None:
    """Raise `ConfigError` if no prompt has a hint in the column, or a value is neither a text nor a list."""
    if "{hint}" not in template:
        raise ConfigError(f"'hint_template' must contain {{hint}}, not be {template!r}")
    for prompt in prompts:
        value = prompt.columns.get(column)
        texts = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(text, str | None) for text in texts):
            raise ConfigError(
                f"'hint_column': '{column}' of prompt '{prompt.uid}' must be a text or a list of texts, the "
                f"weakest hint first, not {value!r:.80}"
            )
    if prompts and not any(tiers(prompt.columns.get(column), 1) for prompt in prompts):
        names = sorted({name for prompt in prompts for name in prompt.columns})
        raise ConfigError(
            f"'hint_column': no prompt has a hint in the column '{column}'; the data have "
            f"{', '.join(names) or 'no columns'}"
        )
