"""Game: two players who number the same images differently negotiate how to divide them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import game
from mmrl.core.answer_text import last_box, plain
from mmrl.core.games import PAYOFF, Game, Turn
from mmrl.core.types import Media, Message, Part, Prompt
from mmrl.data.templates import TextTemplate, quoted

PLAYERS = ("first", "second")
SPEAK = """\
You and another player divide the {{ values | length }} images above. Both see the same images, each in an \
order of their own, so numbers mean nothing to the other player. An image is worth to you:
{% for value in values %}
Image {{ loop.index }}: {{ value }}
{% endfor %}
You get the images that you claim and the other player does not; an image that both claim is lost.
{% for own, other, earned in history %}
Round {{ loop.index }}. You said: {{ own }}
The other player said: {{ other }}
You earned {{ earned }} of 1.
{% endfor %}
{{ rounds_left }} rounds are left. Tell the other player in words what you want, then write the numbers of \
the images that you claim in \\boxed{}, such as \\boxed{1, 2}.
"""


@dataclass(frozen=True)
class Deal:
    """State of a negotiation; players are 0 and 1."""

    images: tuple[Media, ...]
    orders: tuple[tuple[int, ...], ...]  # per player, the images in the order in which the player sees them
    values: tuple[tuple[int, ...], ...]  # per player, the value of every image
    moves: tuple[tuple[str, frozenset[int]], ...] = ()  # (public text, claimed images) of every turn

    def earned(self, turn: int) -> float:
        """Return the earnings of a turn's player in its round, as a fraction of the player's total value."""
        alone, values = self.moves[turn][1] - self.moves[turn ^ 1][1], self.values[turn % 2]
        return sum(values[image] for image in alone) / sum(values)


@game
class Negotiation(Game):
    r"""Two players divide the images of a prompt over several rounds, scored by rule.

    Each player sees all images in an order of its own, with private values from 1 to `max_value`. In every
    round both speak at the same time and claim images by their own numbers in \\boxed{}; the words before the
    box are read by the other player in later rounds. A player earns the values of images that it alone
    claims, divided by the sum of its values. Players must describe images to agree, and both gain most if
    each takes what it values more. Every turn has the tag `role` (`first` or `second`) and records `payoff`,
    what it earned in its round. It is a general-sum game, for advantage alignment (arXiv 2511.19405) and
    other methods of several players. The rules are our own.

    Args:
        rounds: Number of rounds.
        max_value: Largest value of an image.
        zero_sum: Whether a turn's payoff is what it earned less what the other player earned.
        template: Text that players read after the images, in jinja2, with `values` (in the player's order),
            `history` (own words, words of the other, earned share) and `rounds_left`.
    """

    roles = PLAYERS

    def __init__(
        self,
        *,
        rounds: PositiveInt = 3,
        max_value: PositiveInt = 9,
        zero_sum: bool = False,
        template: str = SPEAK,
    ) -> None:
        self.rounds, self.max_value, self.zero_sum = rounds, max_value, zero_sum
        known = {"values", "history", "rounds_left"}
        self.template = TextTemplate(template, known, {"values"}, "the game vision.negotiation")

    def begin(self, prompt: Prompt, generator: Generator) -> Deal:
        """Draw orders and values. Raises `ValueError` for a prompt with fewer than two images."""
        images = tuple(media for media in prompt.media if media.kind == "image")
        if len(images) < 2:
            raise ValueError(
                f"the game vision.negotiation divides images, but prompt '{prompt.uid}' has {len(images)}; "
                "vision.image_pairs and the column `images` of vision.visual_qa give several"
            )
        orders = [tuple(torch.randperm(len(images), generator=generator).tolist()) for _ in PLAYERS]
        values = torch.randint(1, self.max_value + 1, (2, len(images)), generator=generator).tolist()
        return Deal(images, tuple(orders), tuple(map(tuple, values)))

    def acting(self, state: Deal) -> Sequence[str]:
        """Return who acts next: both players, until all rounds are over."""
        return PLAYERS if len(state.moves) < 2 * self.rounds else ()

    def observe(self, state: Deal, player: str) -> Sequence[Message]:
        """Return the images in the player's order, with its values and the rounds so far."""
        own = PLAYERS.index(player)
        done = len(state.moves) // 2
        turns = [2 * number + own for number in range(done)]
        words: dict[str, Any] = {
            "values": [state.values[own][image] for image in state.orders[own]],
            "history": [
                (state.moves[turn][0], state.moves[turn ^ 1][0], f"{state.earned(turn):.2f}")
                for turn in turns
            ],
            "rounds_left": self.rounds - done,
        }
        shown = [Part(media=state.images[image]) for image in state.orders[own]]
        return [Message("user", (*shown, Part(self.template(words).strip(), quoted=True)))]

    def act(self, state: Deal, player: str, answer: str) -> Deal:
        """Return the state after a player spoke and claimed; unreadable numbers are ignored."""
        box, order = last_box(answer), state.orders[PLAYERS.index(player)]
        numbers = re.findall(r"(?<![\d.-])\d+(?![\d.])", plain(answer[box[1] : box[2]])) if box else []
        claims = {order[int(n) - 1] for n in numbers if len(n) < 4 and 1 <= int(n) <= len(order)}
        words = quoted(" ".join(answer[: box[0] if box else None].split()))
        return replace(state, moves=(*state.moves, (words, frozenset(claims))))

    def payoff(self, state: Deal) -> Mapping[str, float]:
        """Return the sum of each player's payoffs."""
        paid = [self._paid(state, turn) for turn in range(len(state.moves))]
        return {player: sum(paid[number::2]) for number, player in enumerate(PLAYERS)}

    def record(self, state: Deal, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return the payoff of every turn."""
        return [{PAYOFF: self._paid(state, turn)} for turn in range(len(turns))]

    def _paid(self, state: Deal, turn: int) -> float:
        return state.earned(turn) - (state.earned(turn ^ 1) if self.zero_sum else 0.0)
