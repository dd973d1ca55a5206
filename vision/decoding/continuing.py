"""Interfaces of engines that continue answers and conversations, in this process or on servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from mmrl.core.protocols import Engine
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.branching import Branch, Grown
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt


class TurnSampler(Protocol):
    """Interface of samplers of conversation turns, which may keep caches from one turn to the next."""

    def sample(self, requests: Sequence[GenerationRequest]) -> Rollouts:
        """Sample one turn for every request, in order; a conversation without a request has ended."""
        ...

    def part(self, parents: Mapping[tuple[str, int], tuple[str, int]]) -> None:
        """Branch conversations: `parents` maps new to existing ones, both keyed by (prompt uid, index)."""


class ContinuingEngine(Protocol):
    """Interface of engines that continue answers from given tokens, in this process or on servers."""

    policy: TokenPolicy
    max_completion_length: int
    stream: Stream

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample an answer for every entry of `prompts`, in order."""
        ...

    def answer(self, rows: Sequence[GenerationRequest]) -> Rollouts:
        """Sample an answer to every request, in order, of at most one token per number in `uniform`."""
        ...

    def grow(
        self, branches: Sequence[Branch], *, temperature: float | None = None, batch_size: int = 0
    ) -> list[Grown | None]:
        """Sample branches; return None for a branch whose parent ended before the branch begins.

        `temperature` replaces the engine's temperature, unless None. `batch_size` limits the rows of a batch
        in this process; 0: use the engine's batch size.
        """
        ...

    def row(
        self,
        prompt: Prompt,
        encoded: EncodedPrompt,
        notes: dict[str, Tensor],
        stopped: bool,
        chosen: Tensor | None = None,
    ) -> Trajectory:
        """Build the training row of a sampled answer; see `answer_row`."""
        ...


class GreedyEngine(ContinuingEngine, Protocol):
    """Interface of engines that can return a copy of themselves for greedy decoding."""

    def greedily(self) -> Engine:
        """Return a copy of the engine that decodes greedily."""
        ...


class ConversationEngine(Protocol):
    """Interface of engines that continue conversations from tokens and media, several at once.

    `batch_size` is the number of conversations that are sampled together (0: all).
    """

    policy: TokenPolicy
    max_completion_length: int
    batch_size: int

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample an answer for every entry of `prompts`, in order."""
        ...

    def converse(self) -> TurnSampler:
        """Begin a batch of conversations; return the sampler of their turns."""
        ...
