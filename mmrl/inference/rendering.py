"""Prompts of an evaluation, rendered again for the model under changed settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from mmrl.config.changes import inside
from mmrl.config.schema import EvaluateConfig
from mmrl.config.sweep import changed_config
from mmrl.core.protocols import RendersPrompts
from mmrl.core.types import Prompt
from mmrl.data.readable import engines_of, prompt_check
from mmrl.reporting.effects import PromptDifference, prompt_difference


class Rendering:
    """Prompts of an evaluation as the model reads them, also under changed settings; loads no weights."""

    def __init__(
        self,
        read: Callable[[EvaluateConfig], Mapping[str, Prompt]],
        config: EvaluateConfig,
        uids: Sequence[str],
    ) -> None:
        self.read, self.config, self.uids = read, config, uids

    @cached_property
    def prompts(self) -> Mapping[str, Prompt]:
        """The prompts as the evaluation read them, by uid."""
        return self.read(self.config)

    @cached_property
    def renderer(self) -> Any:
        """The prompt check of the policy, which renders if it is a `RendersPrompts`; None without one."""
        return self._renderer(self.config)

    @cached_property
    def texts(self) -> dict[str, tuple[str, str]]:
        """Text and input hash of every prompt under the settings of the evaluation."""
        return self._render(self.config, self.prompts)

    def difference(self, setting: str, value: Any) -> PromptDifference | None:
        """Count the prompts whose inputs differ under another setting; None if it cannot change prompts."""
        option = re.match(r"policy\.(\w+)", setting)
        if option and option[1] not in getattr(self.renderer, "rendering", ()):
            return None
        config = changed_config(self.config, {setting: value})
        prompts = self.read(config) if inside(setting, "evaluation.data") else self.prompts
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
