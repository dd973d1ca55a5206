"""Interface of multi-player games: who acts, what players read, state transitions, payoffs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Generator

from mmrl.core.types import Message, Prompt

PAYOFF = "payoff"  # name of the reward that `Game.record` gives


@dataclass(frozen=True)
class Turn:
    """A finished turn: the player, its number among all turns of the game, the answer, and tags."""

    player: str
    number: int
    answer: str
    tags: Mapping[str, str]


class Game:
    """Base class of the rules of a game, for the engine `play`. States are immutable values of any type.

    A player is a name, which by default is also its role. If players share a role, or roles are random,
    override `tags` to return the role. All random draws of a game are made in `begin`.
    """

    roles: Sequence[str] = ()  # all values of the tag `role`
    sets_tags: frozenset[str] = frozenset({"role"})  # names of the tags that `tags` returns

    def begin(self, prompt: Prompt, generator: Generator) -> Any:
        """Return the initial state of a game about a prompt."""
        raise NotImplementedError

    def acting(self, state: Any) -> Sequence[str]:
        """Return the players that act simultaneously in a state; empty at the end of the game."""
        raise NotImplementedError

    def observe(self, state: Any, player: str) -> Sequence[Message]:
        """Return the messages that a player reads before it answers."""
        raise NotImplementedError

    def act(self, state: Any, player: str, answer: str) -> Any:
        """Return the state after an answer of a player; the answer can be any text.

        Rules that show the answer to another player must pass it through `mmrl.data.templates.quoted`.
        """
        raise NotImplementedError

    def payoff(self, state: Any) -> Mapping[str, float]:
        """Return the payoff of every player when the game has ended or reached its turn limit.

        In a game that reached the limit unfinished, `acting` still returns players.
        """
        raise NotImplementedError

    def tags(self, state: Any, player: str) -> Mapping[str, str]:
        """Return tags of a player's turn in a state, besides `episode`, `game` and `turn`."""
        return {"role": player}

    def record(self, state: Any, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return the rewards by name of every turn of a game, for the reward `precomputed`.

        By default the last turn of each player gets the player's payoff.
        """
        payoff = self.payoff(state)
        last = {turn.player: turn.number for turn in turns}
        return [{PAYOFF: payoff[turn.player]} if last[turn.player] == turn.number else {} for turn in turns]
