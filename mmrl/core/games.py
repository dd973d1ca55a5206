"""Interface of games: whose turn it is, what players read, effects of answers, payoffs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Generator

from mmrl.core.types import Message, Prompt

PAYOFF = "payoff"  # name of the recorded reward


@dataclass(frozen=True)
class Turn:
    """A finished turn: player, number in the game, answer, and tags."""

    player: str
    number: int
    answer: str
    tags: Mapping[str, str]


class Game:
    """Base class of rules; the engine `play` plays them. A state may be any value, and is never changed.

    A player is a name. Where several players have one role, or a role is drawn, `tags` names the role of a
    turn; otherwise a player is its role. All randomness of a game is drawn in `begin`.
    """

    roles: Sequence[str] = ()  # all words of the tag `role`
    sets_tags: frozenset[str] = frozenset({"role"})  # the names of what `tags` gives

    def begin(self, prompt: Prompt, generator: Generator) -> Any:
        """Return the state in which a game about a prompt begins."""
        raise NotImplementedError

    def acting(self, state: Any) -> Sequence[str]:
        """Return the players that act now, without seeing each other's answers; empty at the end."""
        raise NotImplementedError

    def observe(self, state: Any, player: str) -> Sequence[Message]:
        """Return the messages that a player reads before it answers."""
        raise NotImplementedError

    def act(self, state: Any, player: str, answer: str) -> Any:
        """Return the state after an answer, which may be any text.

        Whoever shows it to another player passes it through `mmrl.data.templates.quoted`.
        """
        raise NotImplementedError

    def payoff(self, state: Any) -> Mapping[str, float]:
        """Return the payoff of every player at the end, or as a game stands that the limit of turns cut.

        `acting` still names players then.
        """
        raise NotImplementedError

    def tags(self, state: Any, player: str) -> Mapping[str, str]:
        """Return tags of a player's turn in a state, besides `episode`, `game` and `turn`."""
        return {"role": player}

    def record(self, state: Any, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return the rewards of every turn of a game that has ended or was cut, by name, for `precomputed`.

        By default each player's last turn has its payoff.
        """
        payoff = self.payoff(state)
        last = {turn.player: turn.number for turn in turns}
        return [{PAYOFF: payoff[turn.player]} if last[turn.player] == turn.number else {} for turn in turns]
