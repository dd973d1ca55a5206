"""An engine that plays games of several roles with one policy, or against a frozen policy."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count
from typing import Any, ClassVar

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import engine
from mmrl.config.schema import ConfigError
from mmrl.core.episodes import EPISODE, TURN
from mmrl.core.games import Game, Turn
from mmrl.core.protocols import Engine, Policy
from mmrl.core.rng import Stream
from mmrl.core.types import CHANGED, Message, Prompt, Rollouts, Trajectory

FINISH = "finish"


@dataclass(eq=False)
class Match:
    """The state of one game about a prompt."""

    prompt: Prompt
    index: int  # number of the game among the games about this prompt
    round: int  # sampling round of the step; makes the name unique
    state: Any
    turns: list[Turn] = field(default_factory=list)
    rows: list[Trajectory] = field(default_factory=list)
    frozen: list[bool] = field(default_factory=list)  # whether the frozen policy took each turn
    num_turns: int = 0

    @property
    def name(self) -> str:
        """The name of the game, which is unique within a step."""
        return f"{self.prompt.uid}/{self.round}/{self.index}"


@dataclass(frozen=True)
class PendingTurn:
    """A turn that a player has to take."""

    match: Match
    player: str
    number: int
    tags: Mapping[str, str]
    prompt: Prompt  # what the player reads, with a unique uid


@engine(copies_policy=True, sets_tags={EPISODE, TURN, "game", FINISH, CHANGED})
class Play:
    """Play games about prompts: every rollout is a game, and every turn of a game is a row.

    Rows have the tags `episode` and `game` (the name of the game), `turn` (from 0), `role`, and the tags that
    the rules set. The reward `precomputed` with `at: every` reads the rewards that the rules record, such as
    `payoff`. All games advance together, in one batch of turns. A game that reaches `max_turns` ends
    unfinished: its rows have the tag `finish: turns`, and the rules compute payoffs as for a finished game.
    The column `read` of logged completions has the text that the player read. Any engine can be wrapped;
    its random draws depend on step, prompt, game, turn and player. Replay engines do not store these rows.

    Args:
        engine: The engine that answers a turn.
        game: The rules.
        max_turns: Largest number of turns of a game, over all players.
        frozen: Roles of a frozen policy; turns of these roles give no rows. The policy uses a copy of the
            engine, which must be `vision.generate` or a dataclass around it, such as `vision.with_tools`.
        policy: The frozen policy; by default the run's policy before training. Evaluations must name it.
    """

    notes: frozenset[str] = frozenset()
    row_per_turn: ClassVar[bool] = True  # each turn of a game is a row with its own outcome

    @staticmethod
    def copies_engine(options: Mapping[str, Any]) -> bool:
        """Whether a frozen policy plays, with a copy of the wrapped engine."""
        return bool(options.get("frozen"))

    def __init__(
        self,
        engine: Engine,
        *,
        game: Game,
        stream: Stream,
        max_turns: PositiveInt = 64,
        frozen: tuple[str, ...] = (),
        policy: Callable[[], Policy] | None = None,
    ) -> None:
        unknown = sorted(set(frozen) - set(game.roles))
        if unknown or (frozen and set(frozen) == set(game.roles)):
            raise ConfigError(
                f"`frozen` of play names some of the roles {', '.join(game.roles)} of "
                f"{type(game).__name__}, so that another learns, not {list(frozen)}"
            )
        self.engine, self.policy, self.game, self.stream = engine, engine.policy, game, stream
        self.max_turns, self.frozen = max_turns, frozenset(frozen)
        self.opponent = with_policy(engine, policy) if frozen else engine
        self.counts: Counter[str] = Counter()

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Play a game for every entry of `prompts`; all games advance together, turn by turn."""
        counters: dict[str, count[int]] = defaultdict(count)
        matches = []
        for prompt in prompts:
            index = next(counters[prompt.uid])
            generator = self.stream.generator("game", prompt.uid, index)
            state = self.game.begin(prompt, generator)
            matches.append(Match(prompt, index, self.stream.round, state))
        live = matches
        while pending := [turn for match in live for turn in self._pending(match)]:
            self._answer(pending)
            live = list({id(turn.match): turn.match for turn in pending}.values())
        return tuple(row for match in matches for row in self._rows(match))

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the turns per game, the fraction of unfinished games, and each role's fraction of turns."""
        counts, self.counts = self.counts, Counter()
        games, turns = max(1, counts["games"]), max(1, counts["turns"])
        return {
            "game/turns": counts["turns"] / games,
            "game/unfinished": counts["unfinished"] / games,
            **{f"game/share_of_turns/{role}": counts[f"role {role}"] / turns for role in self.game.roles},
        }

    def _pending(self, match: Match) -> list[PendingTurn]:
        """List the next turns of a game; empty at the end of the game, or if they exceed `max_turns`."""
        players, listed = list(self.game.acting(match.state)), []
        if match.num_turns + len(players) > self.max_turns:
            return []
        for player in players:
            number, match.num_turns = match.num_turns, match.num_turns + 1
            messages = self.game.observe(match.state, player)
            if not messages or not all(isinstance(message, Message) for message in messages):
                raise TypeError(
                    f"{type(self.game).__name__}.observe must return messages (`mmrl.core.types.Message`) "
                    f"for '{player}', not {messages!r:.80}"
                )
            # Give every turn a unique uid, because the inner engine keys random draws by uid.
            tags = dict(self.game.tags(match.state, player))
            prompt = replace(
                match.prompt,
                uid=f"{match.name}/{number}/{player}",
                messages=tuple(messages),
                tags={**match.prompt.tags, **tags},  # the policy selects role adapters by these tags
            )
            listed.append(PendingTurn(match, player, number, tags, prompt))
        return listed

    def _answer(self, pending: Sequence[PendingTurn]) -> None:
        """Sample turns, each with the policy of its role, and update the states of their games."""
        against = [turn.tags.get("role") in self.frozen for turn in pending]
        rows: dict[int, Trajectory] = {}
        for one, answering in ((False, self.engine), (True, self.opponent)):
            places = [place for place, frozen in enumerate(against) if frozen == one]
            if places:
                answers = answering.rollout([pending[place].prompt for place in places])
                if len(answers) != len(places):
                    raise ConfigError(
                        f"the engine {type(answering).__name__} made {len(answers)} rows of {len(places)} "
                        "turns, but play needs one of each, so no conversation of several rows: leave "
                        "`only_n_most_recent_images` of vision.with_tools at 0"
                    )
                rows |= dict(zip(places, answers, strict=True))
        for place, turn in enumerate(pending):
            match, row = turn.match, rows[place]
            answer = row.outcomes[-1].text or ""
            match.state = self.game.act(match.state, turn.player, answer)
            match.turns.append(Turn(turn.player, turn.number, answer, turn.tags))
            match.rows.append(row)
            match.frozen.append(against[place])

    def _recorded(self, match: Match, unfinished: bool) -> list[Mapping[str, float]]:
        """Return the rewards that the rules record for every turn; raises `ValueError` if the rules fail."""
        number = len(match.turns)
        which = f"the game '{match.name}' of {type(self.game).__name__}, "
        which += f"which `max_turns` cut after {number} turns" if unfinished else f"of {number} turns"
        try:
            recorded = list(self.game.record(match.state, match.turns))
        except Exception as error:  # rules may raise any error for an unfinished game
            raise ValueError(f"`record` or `payoff` failed for {which}: {error!r}") from error
        if len(recorded) != number or not all(
            math.isfinite(value) for rewards in recorded for value in rewards.values()
        ):
            raise ValueError(
                f"`record` must give a mapping of finite rewards for each turn, but for {which}, gave "
                f"{recorded!r:.200}"
            )
        return recorded

    def _rows(self, match: Match) -> list[Trajectory]:
        """Create the rows of a finished game, with the rewards that its rules record."""
        unfinished = bool(self.game.acting(match.state))
        recorded = self._recorded(match, unfinished)
        self.counts.update(games=1, turns=len(match.turns), unfinished=unfinished)
        self.counts.update(f"role {turn.tags.get('role', '')}" for turn in match.turns)
        rows = []
        for turn, row, rewards, frozen in zip(match.turns, match.rows, recorded, match.frozen, strict=True):
            if frozen:
                continue
            last = row.outcomes[-1]
            names = {EPISODE: match.name, "game": match.name, TURN: str(turn.number), CHANGED: "yes"}
            tags = {**last.tags, **turn.tags, **names}
            if unfinished:
                tags[FINISH] = "turns"
            outcome = replace(last, tags=tags, recorded={**last.recorded, **rewards})
            prompt = replace(row.prompt, uid=match.prompt.uid)
            logged = {**row.logged, "read": row.prompt.text}
            rows.append(
                replace(row, prompt=prompt, group=match.prompt.uid, outcomes=(outcome,), logged=logged)
            )
        return rows


def with_policy(engine: Engine, policy: Callable[[], Policy] | None) -> Engine:
    """Load a policy, freeze it, and return a copy of an engine (with its inner engines) that uses it."""
    if policy is None:
        raise ConfigError(
            "`frozen` of play needs the policy that plays these roles: set `policy: {name: vision.tokens, "
            "model: ...}`"
        )
    layers: list[Any] = [engine]
    while not _takes(layers[-1], "policy"):
        if not _takes(layers[-1], "engine"):
            raise ConfigError(
                f"`frozen` of play needs an engine that can be copied for another policy, such as "
                f"vision.generate or a dataclass around it, not {type(layers[-1]).__name__}"
            )
        layers.append(layers[-1].engine)
    if getattr(layers[-1], "answers_elsewhere", False):
        raise ConfigError("`frozen` of play needs `vision.generate`: servers hold one policy")
    loaded, device = policy(), next(engine.policy.module.parameters()).device
    loaded.module.requires_grad_(False).to(device)
    copied = replace(layers.pop(), policy=loaded)
    return reduce(lambda inner, layer: replace(layer, engine=inner), reversed(layers), copied)


def _takes(engine: Any, name: str) -> bool:
    """Whether an engine is a dataclass whose constructor takes a field of this name."""
    fields = dataclasses.fields(engine) if dataclasses.is_dataclass(engine) else ()
    return any(field.init and field.name == name for field in fields)
