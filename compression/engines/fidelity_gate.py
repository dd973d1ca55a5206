"""The engine `fidelity_gate`: caches and transforms are checked before the first rollout."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.compression.engine_base import AcceleratedEngine, AcceleratedEngineWrapper, is_accelerated
from mmrl.compression.fidelity import gate
from mmrl.config.ranges import NonNegativeFloat, PositiveInt, Probability
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts
from mmrl.runtime.modules import evaluating


@engine
class FidelityGate(AcceleratedEngineWrapper):
    """Stop a run whose cache or transforms change greedy answers too much.

    The policy answers greedily with the full cache; the engine's cache and transforms then read the same
    answers.

    Args:
        engine: The engine to wrap, with a cache or transforms.
        num_prompts: Distinct prompts to measure.
        num_tokens: Tokens of each answer.
        min_agreement: Least share of tokens that stay the likeliest, in [0, 1].
        max_kl: Largest mean KL(policy || engine) per token, in nats.
        allow: Only print the result, and go on in any case.
    """

    def __init__(
        self,
        engine: AcceleratedEngine,
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
        """Answer with the wrapped engine, after the check on the first call."""
        if not self.checked and prompts and is_accelerated(self):
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
            call = {"input_ids": encoded.ids[None], "position_ids": positions, **encoded.media}
            inputs.append({name: x.to(device) for name, x in call.items()})
        own = None if self.rollout_policy is self.policy else self.rollout_policy.model
        # In training mode, layers with gradient checkpointing use no cache.
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
