"""Prompts of an evaluation, rendered again for the model under changed settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from mmrl.config.changes import inside
from mmrl.config.schema import EvaluateConfig
from mmrl.config.sweep import changed_config
from mmrl.core.protocols import RendersPrompts
from mmrl.core.types import Prompt
from mmrl.data.readable import engines_of, prompt_check
from mmrl.reporting.effects import PromptDifference, prompt_difference


class ReadsPrompts(Protocol):
    """An evaluation whose prompts can be read again, by uid."""

    @property
    def prompts(self) -> Mapping[str, Prompt]:
        """The prompts as the evaluation read them."""
        ...

    def read_prompts(self, config: EvaluateConfig) -> Mapping[str, Prompt]:
        """Read the same prompts from the data of another configuration."""
        ...


class Rendering:
    """Prompts of an evaluation as the model reads them, rendered without weights for changed settings."""

    def __init__(self, stored: ReadsPrompts, config: EvaluateConfig, uids: Sequence[str]) -> None:
        self.stored, self.config, self.uids = stored, config, uids

    @cached_property
    def renderer(self) -> Any:
        """The prompt check of the policy, which renders if it is a `RendersPrompts`; None without one."""
        return self._renderer(self.config)

    @cached_property
    def texts(self) -> dict[str, tuple[str, str]]:
        """Text and input hash of every prompt under the settings of the evaluation."""
        return self._render(self.config, self.stored.prompts)

    def difference(self, setting: str, value: Any) -> PromptDifference | None:
        """Count the prompts whose inputs differ under another setting; None if it cannot change prompts."""
        option = re.match(r"policy\.(\w+)", setting)
        if option and option[1] not in getattr(self.renderer, "rendering", ()):
            return None
        config = changed_config(self.config, {setting: value})
        prompts = (
            self.stored.read_prompts(config) if inside(setting, "evaluation.data") else self.stored.prompts
        )
        return prompt_difference(self.texts, self._render(config, prompts), self.uids)

    def _render(self, config: EvaluateConfig, prompts: Mapping[str, Prompt]) -> dict[str, tuple[str, str]]:
        renderer = self._renderer(config)
        if not isinstance(renderer, RendersPrompts):
            return {uid: (prompts[uid].text, prompts[uid].text) for uid in self.uids}
        return {uid: (renderer.render(prompts[uid]), renderer.input_hash(prompts[uid])) for uid in self.uids}

    @staticmethod
    def _renderer(config: EvaluateConfig) -> Any:
        check = prompt_check(config.policy, engines_of(config)["evaluation.data"])
        return check and check.check
