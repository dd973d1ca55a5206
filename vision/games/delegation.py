"""Game of a planner that delegates subtasks to sub-agents, reads their replies, and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import game
from mmrl.core.answer_text import tagged
from mmrl.core.games import Game, Turn
from mmrl.core.types import Message, Part, Prompt
from mmrl.data.templates import TextTemplate, quoted

MAIN, SUB = "main", "sub"
PLAN, ACT, SWITCH = "plan", "act", "switch"
SPEAK = """\
{% for task, reply in replies %}
Task: {{ task }}
Reply: {{ reply }}
{% endfor %}
{% if part == "act" %}
{{ task }}
{% elif part == "switch" %}
Write keep to have the same tasks done again, or switch to make another plan or to answer.
{% elif rounds_left %}
You may have parts of this done by others, who see the images but not the question. Write each part as \
<task>...</task>, at most {{ most }}; without a task, what you write is your answer.
{% else %}
Write your answer now.
{% endif %}
"""


@dataclass(frozen=True)
class Delegated:
    """State of a conversation between a planner and its sub-agents."""

    prompt: Prompt
    name: str = ""  # random name, unlike that of other games of the prompt
    part: str = PLAN  # kind of the next turn (PLAN, ACT, SWITCH); empty at the end
    tasks: tuple[str, ...] = ()  # tasks of the current plan
    replies: tuple[tuple[str, str], ...] = ()  # (task, reply) of sub-agents, in order
    rounds: int = 0  # number of rounds in which sub-agents were asked so far
    planned: str = ""  # name of the turn that made the current plan
    worth: tuple[float | None, ...] = ()  # reward of every turn; None unless it is a plan


@game(sets_tags={"role", "part", "node", "parent"})
class Delegation(Game):
    """A planner asks sub-agents for parts of a task, reads their replies, and plans again or answers.

    The planner reads the prompt and writes tasks in <task> blocks. Sub-agents do them at the same time; each
    sees the media of the prompt and its own task. A plan without a task is the answer, and so is the plan
    after `rounds` rounds; the reward `exact_match` scores the last turn of a game, or with `at: every` all
    turns. One policy plays all roles, or an adapter for each (`roles: [main, sub]` of `vision.tokens`, and
    `vision.by_role`), and an engine with tools may be wrapped.

    Rows have the tags `role` (`main`, `sub`), `part` (`plan`, `act`, and `switch` for a decision to keep the
    plan), `node` (a name of the turn) and `parent` (the node of the plan that it continues). Plans
    record `turn_reward`: the share of their tasks that are new; 1 for an answer. M-GRPO (arXiv 2511.13288),
    HiPER (arXiv 2602.16165) and MARS2 (arXiv 2604.14564) read these tags. The rules are our own.

    Args:
        rounds: How often sub-agents are asked.
        max_tasks: Largest number of tasks of a plan; further ones are ignored.
        decide: Let the planner decide after every round whether to keep the plan (HiPER). It keeps the plan
            if its answer has the word keep, and then the same tasks are done again.
        template: Text that players read, in jinja2, with `part`, `task`, `replies` (pairs of task and
            reply), `rounds_left` and `most` (`max_tasks`); the planner reads it after the prompt.
    """

    roles = (MAIN, SUB)

    def __init__(
        self,
        *,
        rounds: PositiveInt = 2,
        max_tasks: PositiveInt = 2,
        decide: bool = False,
        template: str = SPEAK,
    ) -> None:
        self.rounds, self.max_tasks, self.decide = rounds, max_tasks, decide
        known = {"part", "task", "replies", "rounds_left", "most"}
        self.template = TextTemplate(template, known, {"task", "replies"}, "the game vision.delegation")

    def begin(self, prompt: Prompt, generator: Generator) -> Delegated:
        """Return the initial state, with a random name that keeps `node` names of games apart."""
        return Delegated(prompt, f"{int(torch.randint(1 << 62, (), generator=generator)):x}")

    def acting(self, state: Delegated) -> Sequence[str]:
        """Return who acts next: the planner, or one sub-agent for every task of its plan."""
        if state.part == ACT:
            return tuple(f"{SUB} {number}" for number in range(1, len(state.tasks) + 1))
        return (MAIN,) if state.part else ()

    def observe(self, state: Delegated, player: str) -> Sequence[Message]:
        """Return the prompt with the replies so far, or the media with one task for a sub-agent."""
        words: dict[str, Any] = {
            "part": state.part,
            "task": "",
            "replies": state.replies,
            "rounds_left": self.rounds - state.rounds,
            "most": self.max_tasks,
        }
        if state.part != ACT:
            text = Part(self.template(words).strip(), quoted=True)
            return [*state.prompt.messages, Message("user", (text,))]
        words |= {"task": state.tasks[number_of(player)], "replies": ()}
        shown = [Part(media=media) for media in state.prompt.media]
        return [Message("user", (*shown, Part(self.template(words).strip(), quoted=True)))]

    def tags(self, state: Delegated, player: str) -> Mapping[str, str]:
        """Return the tags `role`, `part`, `node` and `parent` of a player's next turn."""
        role, number = (SUB, number_of(player)) if state.part == ACT else (MAIN, 0)
        return {
            "role": role,
            "part": state.part,
            "node": f"{state.name}/{len(state.worth) + number}",
            "parent": state.planned,
        }

    def act(self, state: Delegated, player: str, answer: str) -> Delegated:
        """Return the state after a plan, a decision or a reply."""
        if state.part == ACT:
            number = number_of(player)
            reply = (state.tasks[number], quoted(answer.strip()))
            state = turned(state, None, replies=(*state.replies, reply))
            if number + 1 < len(state.tasks):
                return state
            again = self.decide and state.rounds + 1 < self.rounds
            return replace(state, rounds=state.rounds + 1, part=SWITCH if again else PLAN)
        if state.part == SWITCH:
            keep = re.search(r"\bkeep\b", answer, re.IGNORECASE)
            return turned(state, None, part=ACT if keep else PLAN)
        node = f"{state.name}/{len(state.worth)}"
        found = [quoted(task.strip()) for task in tagged(answer, "task") if task.strip()][: self.max_tasks]
        if not found or state.rounds == self.rounds:
            return turned(state, 1.0, part="", planned=node)
        new = set(found) - {task for task, _ in state.replies}
        return turned(state, len(new) / len(found), part=ACT, tasks=tuple(found), planned=node)

    def payoff(self, state: Delegated) -> Mapping[str, float]:
        """Return no payoffs: rewards score the answers."""
        return {}

    def record(self, state: Delegated, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return the `turn_reward` of every turn: the fraction of new tasks in a plan; nothing for others."""
        return [{} if worth is None else {"turn_reward": worth} for worth in state.worth]


def number_of(player: str) -> int:
    """Return the number of a sub-agent, from 0."""
    return int(player.removeprefix(SUB)) - 1


def turned(state: Delegated, worth: float | None, **changes: Any) -> Delegated:
    """Return the state after one more turn, which has the reward `worth`; `changes` are other new fields."""
    return replace(state, worth=(*state.worth, worth), **changes)
