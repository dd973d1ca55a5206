"""Conversations with environments in TRL's form: objects that keep the state of one rollout each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

import torch

from mmrl.config.registry import engine
from mmrl.config.schema import ConfigError
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.call_formats import parser_of
from mmrl.vision.conversation import CALL, Conversation, Replies, images_of
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.environment_calls import Episode, LostEnvironment, Shown, choose, named, observed
from mmrl.vision.tool_calls import Owner, Tool
from mmrl.vision.tool_pool import run_calls
from mmrl.vision.tool_replies import Answer, Limits, ToolFault


@dataclass(eq=False)
class Played(Conversation):
    """A conversation with an environment; `reward` is NaN where the environment failed, None without one."""

    episode: Episode = field(kw_only=True)
    reward: float | None = math.nan


@engine
@dataclass(eq=False)
class WithEnvironments(WithTools):
    """Let the policy act in environments in TRL's form, whose public methods are its tools.

    Every rollout has an object of its own: `reset(**columns)` begins the episode with the columns of the row,
    and what it returns is appended to the prompt; all public methods but `reset` and `get_reward` are tools,
    which may change the state of the object; `get_reward()`, if there is one, is recorded under the name of
    the environment, for the reward `precomputed`. Calls of a conversation are made in order, those of
    different conversations at the same time, also while others still generate. Rewards in TRL's form get the
    objects as `environments`; one that did not come back in time is false there, and reading it an error.
    All else is as `vision.with_tools` does it.

    Args:
        environment: Classes, or functions that make an object; each may have `label` (its name), `timeout`
            (seconds of each method), `retries` of `reset`, and `on_error` and what it may do (`reads`,
            `writes`, `network`, `process`) as tools have them. Of several, the column `environment` of a row
            names the one that it is for.
        tool: Further functions that the model may call, in every environment.
        seed_rollouts: Draw what an environment begins with for every rollout by itself; else once for all
            rollouts of a prompt, so that a group is compared on the same task.
        max_turns: The most turns of the policy; a call in the last one is not made.
        max_completion_length: The most tokens that the policy chooses in a conversation.
        max_images: The most images and videos that tools show in a conversation.
        only_n_most_recent_images: Images and videos of calls that stay in the prompt; 0: all. What `reset`
            shows belongs to the prompt, and stays.
        max_context: The most tokens of a conversation, read and chosen; 0: the positions of the model.
        max_reply_chars: The most characters of the texts that a tool returns at once; the rest is cut off.
        max_image_pixels: The most pixels of an image, or of all of a video, that a tool returns; more are an
            error of the tool.
        turn_outcomes: Make an outcome of every turn, all of which rewards score, instead of the last alone.
    """

    _: KW_ONLY
    environment: Callable | tuple[Callable, ...]
    tool: tuple[Callable, ...] = ()
    seed_rollouts: bool = False
    has_others: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds = named(self.environment if isinstance(self.environment, tuple) else (self.environment,))
        for kind in self.kinds.values():
            if taken := sorted(self.tools.keys() & {tool.name for tool in kind.tools}):
                raise ConfigError(
                    f"`tool` and the environment '{kind.name}' both have '{taken[0]}'; rename one of them"
                )
        schemas = [*self.schemas, *(tool.schema for kind in self.kinds.values() for tool in kind.tools)]
        self.read_calls = parser_of(self.policy.prompt_encoder, tuple(schemas), self.parse)

    def begin(self, asked: Sequence[tuple[Prompt, int]]) -> list[Conversation]:
        """Make and reset an environment for every conversation, and show what it shows first."""
        serial, shown = Owner(), Shown()
        episodes, calls = [], []
        for prompt, index in asked:
            key = (prompt.uid, index) if self.seed_rollouts else (prompt.uid,)
            seed = int(torch.randint(1 << 31, (1,), generator=self.stream.generator("environment", *key)))
            kind, columns = choose(self.kinds, prompt)
            episodes.append(Episode(kind=kind, seed=seed))
            calls.append(episodes[-1].begin(columns, images_of(prompt), serial))
        talks = []
        for (prompt, index), episode, answer in zip(asked, episodes, self._run(calls), strict=True):
            if answer.fault:  # there is nothing to converse about
                raise _broken(episode, "reset", prompt, answer)
            given = observed(prompt, shown.once(answer.parts))
            tools = {**episode.tools(), **self.tools}
            schemas = tuple(tool.schema for tool in tools.values())
            read = self._encode(given, schemas)
            talks.append(Played(given, index, read, images_of(given), tools, episode=episode))
        return talks

    def end(self, talks: Sequence[Played]) -> Rollouts:
        """Ask the environments for their rewards, and make the rows."""
        asked = [talk for talk in talks if talk.episode.kind.scores and not talk.episode.lost]
        for talk, answer in zip(asked, self._run([talk.episode.ask() for talk in asked]), strict=True):
            if not answer.fault:
                talk.reward = answer.value
            elif talk.episode.kind.on_error != "skip":
                raise _broken(talk.episode, "get_reward", talk.prompt, answer)
        return super().end(talks)

    def _run(self, calls: Sequence[Tool]) -> list[Answer]:
        limits = Limits(self.max_reply_chars, self.max_image_pixels)
        return run_calls([(call, []) for call in calls], limits)

    def _continue(self, talk: Played, replies: Replies) -> None:
        """Append the replies, or end a conversation whose environment still runs an earlier call."""
        if talk.episode.lost and talk.episode.kind.on_error != "raise":
            self.counts["errors"] += 1
            talk.finish = "tool_error"
            return
        super()._continue(talk, replies)

    def _row(self, talk: Played) -> Trajectory:
        row, kind = super()._row(talk), talk.episode.kind
        lost = LostEnvironment(kind.name, talk.prompt.uid)
        environment = lost if talk.episode.lost else talk.episode.environment
        outcomes = [replace(outcome, environment=environment) for outcome in row.outcomes]
        if kind.scores and talk.reward is not None and talk.finish != CALL:
            recorded = {**outcomes[-1].recorded, kind.name: talk.reward}
            outcomes[-1] = replace(outcomes[-1], recorded=recorded)
        return replace(row, outcomes=tuple(outcomes))


def _broken(episode: Episode, method: str, prompt: Prompt, answer: Answer) -> ToolFault:
    where = f"`{method}` of the environment '{episode.kind.name}' failed for prompt '{prompt.uid}'"
    fault = ToolFault(f"{where}: {answer.fault}")
    fault.__cause__ = answer.cause
    return fault
