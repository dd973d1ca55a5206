"""Engines that compare rollouts of a compressed policy with exact rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from mmrl.compression.fidelity import gate, inputs_of
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts
from mmrl.runtime.modules import evaluating


class AcceleratedEngine(Protocol):
    """Protocol of an engine with a compressed cache or a transformed copy of its policy's model."""

    policy: Any
    rollout_policy: Any  # policy that generates: the engine's policy, or a transformed copy
    cache: Callable | None  # creates the KV cache; None: the full cache

    def exactly(self) -> AbstractContextManager:
        """Return a context in which the engine uses the full cache and the policy's own model."""

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Generate an answer to every prompt, in order."""


class Measured:
    """Base class of engines that wrap an accelerated engine and compare it with its policy."""

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: AcceleratedEngine, name: str) -> None:
        self.engine, self.policy, self.exactly = engine, engine.policy, engine.exactly
        if not self.accelerated:
            raise ValueError(
                f"`{name}` compares an accelerated engine with its policy, but the engine that it wraps has "
                "neither a cache nor a transform"
            )

    # These are properties, because the engine's attributes change inside `exactly`.
    rollout_policy = property(lambda self: self.engine.rollout_policy)
    cache = property(lambda self: self.engine.cache)

    @property
    def accelerated(self) -> bool:
        """Whether the wrapped engine currently uses a compressed cache or another model than the policy's."""
        return self.cache is not None or self.rollout_policy is not self.policy


@engine
class FidelityGate(Measured):
    """Stop a run whose cache or transforms change greedy answers too much.

    The policy answers greedily with the full cache. Then the engine's cache and transformed model compute the
    probabilities of the same answers.

    Args:
        engine: The engine to wrap, with a cache or transforms.
        num_prompts: Number of distinct prompts to compare.
        num_tokens: Number of tokens per answer.
        min_agreement: Smallest fraction of tokens that policy and engine predict alike, in [0, 1].
        max_kl: Largest mean KL(policy || engine) per token, in nats.
        allow: Whether to print the result without stopping the run.
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
        self.num_prompts, self.checked = num_prompts, False
        self.limits = {
            "num_tokens": num_tokens,
            "min_agreement": min_agreement,
            "max_kl": max_kl,
            "allow": allow,
        }

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer with the wrapped engine, after a fidelity check in the first call."""
        if not self.checked and prompts and self.accelerated:
            self.check(prompts)
            self.checked = True
        return self.engine.rollout(prompts)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Measure and print the fidelity on some prompts; raise ValueError if it is below the limits."""
        model = self.policy.model
        device = model.get_input_embeddings().weight.device
        distinct = list({prompt.uid: prompt for prompt in prompts}.values())[: self.num_prompts]
        inputs = inputs_of(self.policy.prompt_encoder, distinct, device)
        own = None if self.rollout_policy is self.policy else self.rollout_policy.model
        # In training mode, layers with gradient checkpointing ignore the cache.
        with evaluating(model), evaluating(own or model):
            gate(model, inputs, self.cache, cheaper=own, **self.limits)


@engine
class SpeedupProbe(Measured):
    """Repeat some rollouts of an accelerated engine without its cache and transforms, and time both runs.

    Both runs use the same random numbers, and the exact answers are discarded. Media are encoded before
    timing. Metrics: `rollout/seconds`, `rollout/exact_seconds`, `rollout/speedup`, `rollout/agreement`
    (fraction of equal answers). The step's own `time/rollout` includes both runs.

    Args:
        engine: The engine to wrap, with a cache or transforms.
        at: Index of the first rollout to repeat, counted from 0.
        every: Interval of later repetitions, in rollouts; 0: no further repetitions.
    """

    def __init__(
        self, engine: AcceleratedEngine, *, at: NonNegativeInt = 1, every: NonNegativeInt = 0
    ) -> None:
        super().__init__(engine, "speedup_probe")
        self.at, self.every, self.calls = at, every, 0
        self.latest: dict[str, float] = {}

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer with the wrapped engine; on the chosen calls, also run and time it without acceleration."""
        since, self.calls = self.calls - self.at, self.calls + 1
        if not prompts or since < 0 or (since % self.every if self.every else since):
            return self.engine.rollout(prompts)
        for prompt in prompts:
            self.policy.prompt_encoder.encode(prompt)  # cache the encoding, so that neither run includes it
        with self.exactly():
            start = time.perf_counter()
            exact = self.engine.rollout(prompts)
            exact_seconds = time.perf_counter() - start
        start = time.perf_counter()
        rows = self.engine.rollout(prompts)
        seconds = time.perf_counter() - start
        same = [a.outcomes[-1].text == b.outcomes[-1].text for a, b in zip(rows, exact, strict=True)]
        self.latest = {
            "rollout/seconds": seconds,
            "rollout/exact_seconds": exact_seconds,
            "rollout/speedup": exact_seconds / seconds,
            "rollout/agreement": sum(same) / len(same),
        }
        return rows

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last repeated rollout and clear them."""
        metrics, self.latest = self.latest, {}
        return metrics
