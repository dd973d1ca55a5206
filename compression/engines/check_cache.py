"""No silent corruption: the cache of an engine is measured before the first rollout."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.compression.fidelity import gate
from mmrl.protocols import Engine
from mmrl.registry import engine
from mmrl.types import Prompt, Rollouts


@engine
class CheckCache:
    """Measure the wrapped engine's cache on the first prompts it is asked, and stop where it changes answers.

    The model answers `num_prompts` prompts greedily in `num_tokens` tokens. At least `min_agreement` of them
    must stay the likeliest, at a mean KL of at most `max_kl` nats to the full cache; `allow` only prints.
    """

    notes: frozenset[str] = frozenset()

    def __init__(
        self,
        engine: Engine,
        *,
        num_prompts: int = 4,
        num_tokens: int = 16,
        min_agreement: float = 0.9,
        max_kl: float = 0.1,
        allow: bool = False,
    ) -> None:
        if engine.cache is None:
            raise ValueError("`check_cache` measures a cache, but the engine it wraps names none")
        self.engine, self.policy, self.num_prompts, self.num_tokens = (
            engine,
            engine.policy,
            num_prompts,
            num_tokens,
        )
        self.min_agreement, self.max_kl, self.allow = min_agreement, max_kl, allow
        self.checked = False

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the wrapped engine, the first time behind the gate."""
        if not self.checked and prompts:
            self._check(prompts)
            self.checked = True
        return self.engine.rollout(prompts)

    def _check(self, prompts: Sequence[Prompt]) -> None:
        model = self.policy.model
        device = model.get_input_embeddings().weight.device
        distinct = list({prompt.uid: prompt for prompt in prompts}.values())[: self.num_prompts]
        inputs = []
        for encoded in map(self.policy.chat.encode, distinct):
            positions = encoded.positions[:, None] if len(encoded.positions) > 1 else encoded.positions
            given = {"input_ids": encoded.ids[None], "position_ids": positions, **encoded.media}
            inputs.append({name: x.to(device) for name, x in given.items()})
        gate(
            model,
            inputs,
            self.engine.cache,
            num_tokens=self.num_tokens,
            min_agreement=self.min_agreement,
            max_kl=self.max_kl,
            allow=self.allow,
        )
