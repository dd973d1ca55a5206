"""No silent corruption: the cache and the transforms of an engine are measured before the first rollout."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.compression.engine_base import Cheap, Watching, is_cheap
from mmrl.compression.fidelity import gate
from mmrl.config.ranges import NonNegativeFloat, PositiveInt, Probability
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts
from mmrl.runtime.modules import evaluating


@engine
class FidelityGate(Watching):
    """Measure what makes the wrapped engine cheap on the first prompts it is asked, and stop where that
    changes answers.

    The policy's model answers `num_prompts` prompts greedily in `num_tokens` tokens, with the full cache. At
    least `min_agreement` of them must stay the likeliest with the engine's cache and transforms, at a mean KL
    of at most `max_kl` nats to the policy; `allow` only prints.
    """

    def __init__(
        self,
        engine: Cheap,
        *,
        num_prompts: PositiveInt = 4,
        num_tokens: PositiveInt = 16,
        min_agreement: Probability = 0.9,
        max_kl: NonNegativeFloat = 0.1,
        allow: bool = False,
    ) -> None:
        super().__init__(engine, "fidelity_gate")
        self.num_prompts, self.num_tokens = num_prompts, num_tokens
        self.min_agreement, self.max_kl, self.allow = min_agreement, max_kl, allow
        self.checked = False

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the wrapped engine, the first time behind the gate."""
        if not self.checked and prompts and is_cheap(self):
            self._check(prompts)
            self.checked = True
        return self.engine.rollout(prompts)

    def _check(self, prompts: Sequence[Prompt]) -> None:
        model = self.policy.model
        device = model.get_input_embeddings().weight.device
        distinct = list({prompt.uid: prompt for prompt in prompts}.values())[: self.num_prompts]
        inputs = []
        for encoded in map(self.policy.prompt_encoder.encode, distinct):
            positions = encoded.positions[:, None] if len(encoded.positions) > 1 else encoded.positions
            given = {"input_ids": encoded.ids[None], "position_ids": positions, **encoded.media}
            inputs.append({name: x.to(device) for name, x in given.items()})
        own = None if self.rollout_policy is self.policy else self.rollout_policy.model
        # Layers that are computed anew in the backward pass have no cache while they train.
        with evaluating(model), evaluating(own or model):
            gate(
                model,
                inputs,
                self.cache,
                num_tokens=self.num_tokens,
                min_agreement=self.min_agreement,
                max_kl=self.max_kl,
                allow=self.allow,
                cheaper=own,
            )
