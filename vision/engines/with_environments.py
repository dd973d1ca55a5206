"""Engine for conversations with environments in TRL's format: one stateful object per rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

import torch

from mmrl.config.registry import engine
from mmrl.config.schema import ConfigError
from mmrl.core.types import Part, Prompt, Rollouts, Trajectory
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.tools.call_formats import parser_of
from mmrl.vision.tools.conversation import CALL, Conversation, images_of
from mmrl.vision.tools.environments import Episode, LostEnvironment, choose, named, observed
from mmrl.vision.tools.functions import Owner, Tool
from mmrl.vision.tools.pool import Replies, run_calls
from mmrl.vision.tools.replies import Answer, Limits, ToolFault, content_of


@dataclass(eq=False)
class Played(Conversation):
    """State of a conversation with an environment.

    `reward` is the result of `get_reward`, a number or None; it is NaN before a successful call.
    """

    episode: Episode = field(kw_only=True)
    reward: float | None = math.nan


@engine
@dataclass(eq=False)
class WithEnvironments(WithTools):
    """Let the policy act in environments in TRL's format, whose public methods are the tools.

    Every rollout has its own environment object. `reset(**columns)` gets the columns of the row, and its
    result is appended to the prompt. All public methods but `reset`, `get_reward` and `get_turn_reward` are
    tools, and may change the object. The result of `get_reward()`, if the class has this method, is recorded
    under the name of the environment, for the reward `precomputed`. After the calls of a turn,
    `get_turn_reward()` is called; with `turn_outcomes`, its result is recorded as `turn_reward`. Calls of
    one conversation run in order. Calls of different conversations run concurrently, also while other
    conversations still generate. Rewards in TRL's format get the objects as `environments`. If a call timed
    out, rewards get a placeholder instead of the object: its truth value is False, and reading its attributes
    is an error. Everything else is as in `vision.with_tools`.

    Args:
        environment: Classes, or functions that make an object; each may have `label` (its name), `timeout`
            (seconds for each method), `retries` (of `reset`), and `on_error` as in `tool`. With several
            environments, the column `environment` of a row names the environment to use.
        tool: Further functions that the model may call, in every environment.
        seed_rollouts: Seed `reset` differently for every rollout. Otherwise all rollouts of a prompt get one
            seed, so that a group is compared on the same task.
        max_turns: Maximal number of policy turns; calls in the last turn are not run.
        max_completion_length: Maximal number of tokens that the policy samples in a conversation.
        max_images: Maximal number of images and videos from tools in a conversation.
        only_n_most_recent_images: How many of the latest images and videos from tools stay in the prompt; 0:
            all. Media from `reset` belong to the prompt and always stay.
        max_context: Maximal tokens of a conversation, read and sampled; 0: the model's number of positions.
        max_reply_chars: Maximal characters of the texts that a tool returns at once; the rest is cut off.
        max_image_pixels: Maximal pixels of an image, or of all frames of a video, that a tool returns; a
            larger one counts as an error of the tool.
        turn_outcomes: Make an outcome of every turn, so that rewards score all turns instead of the last.
        score_target: Record the probability of the right answer before every turn, as in `vision.with_tools`.
        opener: Text before the right answer.
    """

    _: KW_ONLY
    environment: Callable | tuple[Callable, ...]
    tool: tuple[Callable, ...] = ()
    seed_rollouts: bool = False
    needs_tool: ClassVar[bool] = False

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

    def begin(self, entries: Sequence[tuple[Prompt, int]]) -> list[Conversation]:
        """Create and reset an environment for every conversation; append the observation to its prompt."""
        serial = Owner()
        shown: dict[tuple, Part] = {}  # keyed by content, so that equal images are encoded once
        episodes, calls = [], []
        for prompt, index in entries:
            key = (prompt.uid, index) if self.seed_rollouts else (prompt.uid,)
            seed = int(torch.randint(1 << 31, (1,), generator=self.stream.generator("environment", *key)))
            kind, columns = choose(self.kinds, prompt)
            episodes.append(Episode(kind=kind, seed=seed))
            calls.append(episodes[-1].begin(columns, images_of(prompt), serial))
        talks = []
        for (prompt, index), episode, answer in zip(entries, episodes, self._run(calls), strict=True):
            if answer.fault:
                raise _broken(episode, "reset", prompt, answer)
            given = observed(prompt, [shown.setdefault(content_of(part), part) for part in answer.parts])
            tools = {**episode.tools(), **self.tools}
            schemas = tuple(tool.schema for tool in tools.values())
            read = self._encode(given, schemas)
            talks.append(Played(given, index, read, images_of(given), tools, episode=episode))
        return talks

    def end(self, talks: Sequence[Played]) -> Rollouts:
        """Call `get_reward` of the environments, and create the rows of the conversations."""
        scored = [talk for talk in talks if talk.episode.kind.scores and not talk.episode.lost]
        for talk, answer in zip(scored, self._run([talk.episode.ask() for talk in scored]), strict=True):
            if not answer.fault:
                talk.reward = answer.value
            elif talk.episode.kind.on_error != "skip":
                raise _broken(talk.episode, "get_reward", talk.prompt, answer)
        return super().end(talks)

    def _reply(self, talks: Sequence[Played], last: bool) -> None:
        """Run all calls as `vision.with_tools` does; then call `get_turn_reward` of the environments."""
        super()._reply(talks, last)
        acted = [
            talk for talk in talks if not last and talk.episode.kind.scores_turns and not talk.episode.lost
        ]
        calls = [talk.episode.ask("get_turn_reward") for talk in acted]
        for talk, answer in zip(acted, self._run(calls), strict=True):
            if answer.fault:
                raise _broken(talk.episode, "get_turn_reward", talk.prompt, answer)
            if answer.value is not None:
                talk.recorded[-1]["turn_reward"] = answer.value

    def _run(self, calls: Sequence[Tool]) -> list[Answer]:
        limits = Limits(self.max_reply_chars, self.max_image_pixels)
        return run_calls([(call, []) for call in calls], limits)

    def _continue(self, talk: Played, replies: Replies) -> None:
        """Append the replies to a conversation; end it instead if a call of its environment timed out."""
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
    """Create the `ToolFault` for a failed `reset` or `get_reward`."""
    where = f"`{method}` of the environment '{episode.kind.name}' failed for prompt '{prompt.uid}'"
    fault = ToolFault(f"{where}: {answer.fault}")
    fault.__cause__ = answer.cause
    return fault
