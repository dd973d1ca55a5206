"""The game "who is the spy" over two images that differ in one detail (Vision-Zero, arXiv 2509.25541)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Generator

from mmrl.config.ranges import NonNegativeFloat, PositiveInt
from mmrl.config.registry import game
from mmrl.config.schema import ConfigError
from mmrl.core.answer_text import last_box, plain
from mmrl.core.answers import WORDS
from mmrl.core.games import PAYOFF, Game, Turn
from mmrl.core.types import Frames, Media, Message, Part, Prompt
from mmrl.data.templates import TextTemplate, quoted

OPEN, INVALID = 0, -1  # special votes: N/A (the voter is unsure), and a vote that cannot be parsed
RIGHT_VOTE, OPEN_VOTE, CAUGHT = "right_vote", "open_vote", "spy_caught"
THOUGHT = 10  # reasoning must be longer than this many characters, as in the paper's code
SPEAK = """\
You play "Who is the spy?" with {{ players }} players, and you are player {{ player }}. Every civilian sees \
the same image; in the image of the spy something was replaced.
{% if stage == "clue" and role == "spy" %}
You are the spy. Describe your image so that nobody notices: do not name what may be different.
{% elif stage == "clue" %}
You are a civilian. Describe something of your image that helps to find the spy.
{% else %}
You see the image of the civilians. Find out which player is the spy.
{% endif %}
{% if clues %}
Clues so far:
{% for number, clue in clues %}
Player {{ number }}: {{ clue }}
{% endfor %}
{% endif %}
{% if thoughts %}
Your thoughts before:
{% for thought in thoughts %}
{{ thought }}
{% endfor %}
{% endif %}
Think first. Then write {{ "one sentence" if stage == "clue" else "the number of the spy, or N/A if you \
cannot tell," }} in \\boxed{}.
"""


@dataclass(frozen=True)
class SpyState:
    """State of a game: images, the number of the spy, clues and votes."""

    images: tuple[Media, Media]  # image of the civilians, image of the spy
    spy: int  # number of the spy; players count from 1
    clues: tuple[tuple[int, str], ...] = ()  # (player, clue) in order, visible to all
    answers: tuple[tuple[int, str], ...] = ()  # (player, full answer of the clue stage), not public
    votes: tuple[tuple[str, int, bool], ...] = ()  # (voter, vote, whether the format was right)


@game(sets_tags={"role", "stage", "player"})
class Spy(Game):
    r"""Game "who is the spy": players describe images, one of which differs, and vote (arXiv 2509.25541).

    A prompt has two images, the original and one in which something was replaced; the spy sees the second.
    Players give clues in turn, and vote at the same time. Clues and votes are in \\boxed{}, or else in the
    last line. Rows have the tags `stage` (`clue`, `decide`), `role` (`spy`, `civilian`, and `voter` for
    votes) and `player`. Every turn records `payoff` (the zero-sum clue reward, or the reward of the vote) and
    `spy_caught` (whether the spy alone has the most votes). Votes also record `right_vote` (for the spy) and
    `open_vote` (N/A).
    Our reading: a game without a readable vote has no clue rewards.

    Args:
        civilians: Number of players besides the spy (the paper: 4, its code 3).
        rounds: Number of clues per player.
        spy_sees: Image of the spy. `changed`: the changed image, as in the paper's first version and its
            code. `blank`: a white image, as in the second version, which needs only one image per prompt.
        voters: Who votes. `civilians`: the civilians, as in the paper. `judge`: a neutral judge who sees the
            original and votes `num_votes` times, as in the code.
        num_votes: Number of votes of the judge.
        vote_reward: Reward of a vote. `paper`: 1 for the spy, -0.5 for N/A, -1 for another player. `code`: a
            sum of terms for format and accuracy, as in the paper's code.
        beta: Weight, in clue rewards, of the difference (votes for the spy) - (mean votes for a civilian).
        lam: Weight, in clue rewards, of (votes for this civilian) - (mean votes for a civilian).
        template: Text that players read after the image, in jinja2, with `stage`, `role`, `player`,
            `players`, `clues` (pairs of number and text) and `thoughts` (the player's earlier reasoning).
    """

    roles = ("spy", "civilian", "voter")

    def __init__(
        self,
        *,
        civilians: PositiveInt = 4,
        rounds: PositiveInt = 2,
        spy_sees: Literal["changed", "blank"] = "changed",
        voters: Literal["civilians", "judge"] = "civilians",
        num_votes: PositiveInt = 8,
        vote_reward: Literal["paper", "code"] = "paper",
        beta: NonNegativeFloat = 0.1,
        lam: NonNegativeFloat = 0.1,
        template: str = SPEAK,
    ) -> None:
        if civilians > 8:
            raise ConfigError(
                f"votes are single digits, so that there are at most 8 civilians, not {civilians}"
            )
        self.civilians, self.players, self.rounds = civilians, civilians + 1, rounds
        self.spy_sees, self.voters, self.num_votes = spy_sees, voters, num_votes
        self.vote_reward, self.beta, self.lam = vote_reward, beta, lam
        fields = {"stage", "role", "player", "players", "clues", "thoughts"}
        self.template = TextTemplate(template, fields, {"stage", "role", "clues"}, "the game vision.spy")

    def begin(self, prompt: Prompt, generator: Generator) -> SpyState:
        """Choose the spy at random. Raises `ValueError` for a prompt with too few images."""
        images = [media for media in prompt.media if media.kind == "image"]
        if len(images) < (1 if self.spy_sees == "blank" else 2):
            raise ValueError(
                f"the game vision.spy is about an image and a changed one, but prompt '{prompt.uid}' has "
                f"{len(images)} images; vision.image_pairs reads such data"
            )
        spy = int(torch.randint(self.players, (), generator=generator)) + 1
        return SpyState((images[0], blank(images[0]) if self.spy_sees == "blank" else images[1]), spy)

    def acting(self, state: SpyState) -> Sequence[str]:
        """Return who acts next: the player with the next clue, or all voters once the clues are complete."""
        if len(state.clues) < self.players * self.rounds:
            return (str(len(state.clues) % self.players + 1),)
        if state.votes:
            return ()
        if self.voters == "judge":
            return tuple(f"judge {number}" for number in range(1, self.num_votes + 1))
        return tuple(str(number) for number in self.numbers if number != state.spy)

    @property
    def numbers(self) -> range:
        """Return the numbers of the players."""
        return range(1, self.players + 1)

    def tags(self, state: SpyState, player: str) -> Mapping[str, str]:
        """Return the tags `stage`, `role` and `player` of a player's next turn."""
        if len(state.clues) == self.players * self.rounds:
            return {"stage": "decide", "role": "voter", "player": player}
        return {
            "stage": "clue",
            "role": "spy" if player == str(state.spy) else "civilian",
            "player": player,
        }

    def observe(self, state: SpyState, player: str) -> Sequence[Message]:
        """Return the messages that a player reads: the player's image and the clues so far."""
        tags = self.tags(state, player)
        thoughts = [answer for number, answer in state.answers if str(number) == player]
        words: dict[str, Any] = {**tags, "players": self.players, "clues": state.clues}
        words["thoughts"] = [thought for thought in map(reasoning, thoughts) if thought]
        image = state.images[tags["role"] == "spy"]
        return [Message("user", (Part(media=image), Part(self.template(words).strip(), quoted=True)))]

    def act(self, state: SpyState, player: str, answer: str) -> SpyState:
        """Return the state after a player's answer, with the clue or vote in it."""
        if len(state.clues) < self.players * self.rounds:
            clues = (*state.clues, (int(player), quoted(public(answer))))
            return replace(state, clues=clues, answers=(*state.answers, (int(player), quoted(answer))))
        vote = (player, vote_of(answer, self.players), well_formed(answer))
        return replace(state, votes=(*state.votes, vote))

    def counted(self, state: SpyState) -> tuple[int, list[int]]:
        """Return the number of votes for the spy, and a list with the votes for each civilian."""
        votes = Counter(vote for _, vote, _ in state.votes)
        return votes[state.spy], [votes[number] for number in self.numbers if number != state.spy]

    def caught(self, state: SpyState) -> bool:
        """Whether the spy alone has the most votes."""
        spy, civilians = self.counted(state)
        return spy > max(civilians)

    def payoff(self, state: SpyState) -> Mapping[str, float]:
        """Return the clue reward of every player."""
        spy, civilians = clue_rewards(*self.counted(state), beta=self.beta, lam=self.lam)
        others = iter(civilians)
        return {str(number): spy if number == state.spy else next(others) for number in self.numbers}

    def record(self, state: SpyState, turns: Sequence[Turn]) -> Sequence[Mapping[str, float]]:
        """Return for every turn the reward of its clue or vote, and whether the spy was caught."""
        spy, civilians = self.counted(state)
        of_clues = self.payoff(state) if spy + sum(civilians) else {}
        votes = {voter: (vote, form) for voter, vote, form in state.votes}
        recorded: list[dict[str, float]] = []
        for turn in turns:
            if turn.tags["stage"] == "clue":
                recorded.append({PAYOFF: of_clues[turn.player]} if of_clues else {})
                continue
            vote, form = votes[turn.player]
            worth = decision_reward(vote, state.spy)
            recorded.append(
                {
                    PAYOFF: code_reward(worth, form) if self.vote_reward == "code" else worth,
                    RIGHT_VOTE: float(vote == state.spy),
                    OPEN_VOTE: float(vote == OPEN),
                }
            )
        caught = {CAUGHT: float(self.caught(state))} if state.votes else {}
        return [{**rewards, **caught} for rewards in recorded]


# ---- rewards


def clue_rewards(
    spy: float, civilians: Sequence[float], *, beta: float = 0.1, lam: float = 0.1
) -> tuple[float, list[float]]:
    """Compute the zero-sum rewards of clues from the votes for the spy and for every civilian (eq. 1).

    r_s = -beta (v_s - v), and r_c = beta / n (v_s - v) - lam (v_c - v). v_s and v_c are the votes for the spy
    and a civilian, and v is the mean of v_c over n civilians.
    """
    mean = sum(civilians) / len(civilians)
    ahead = spy - mean
    return -beta * ahead, [beta / len(civilians) * ahead - lam * (votes - mean) for votes in civilians]


def decision_reward(vote: int, spy: int) -> float:
    """Return 1 for a vote for the spy, -0.5 for an open vote, -1 for any other vote (eq. 4)."""
    return 1.0 if vote == spy else -0.5 if vote == OPEN else -1.0


def code_reward(worth: float, form: bool) -> float:
    """Compute the reward of a vote as in the paper's code: from `decision_reward` and the right format."""
    return 0.3 * (1.0 if form else -1.0) + 1.2 * worth + 0.99 * (worth > 0)


# ---- answers


def public(answer: str) -> str:
    """Return the public part of an answer: the last box, or the last line if there is no box."""
    box = last_box(answer)
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return answer[box[1] : box[2]].strip() if box else lines[-1] if lines else ""


def reasoning(answer: str) -> str:
    """Return the reasoning in an answer, which is all text before the public part."""
    box = last_box(answer)
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return answer[: box[0]].strip() if box else "\n".join(lines[:-1])


def vote_of(answer: str, players: int) -> int:
    """Parse a vote: the number of a player, `OPEN` for N/A, or `INVALID`.

    The vote is the first number after the word player, or else the first number. 12, -1 and 1.5 are invalid.
    """
    text = plain(public(answer))
    written = r"-?(?:[.,/%^*]|\d|e(?=\d))*\d(?:[.,/%^*]|\d|e(?=\d))*"
    numbers = re.findall(rf"(?i:player)\s*#?\s*({written})", text) or re.findall(written, text)
    words = [WORDS[word] for word in re.findall("[a-z]+", text.lower()) if WORDS.get(word, "0") != "0"]
    numbers = numbers or words
    if numbers:
        number = numbers[0].rstrip(".,")
        voted = int(number) if re.fullmatch(r"[1-9]\d{0,2}", number) else 0
        return voted if 1 <= voted <= players else INVALID
    return OPEN if re.search(r"\bn\.?\s*/?\s*a\b", text, re.IGNORECASE) else INVALID


def well_formed(answer: str) -> bool:
    """Whether an answer has a public part and more than 10 characters of reasoning before it."""
    return len(reasoning(answer)) > THOUGHT and bool(public(answer))


def blank(image: Media) -> Media:
    """Create a white image of the same size as another image."""

    def load() -> Frames:
        frames = image.load()
        return replace(frames, pixels=torch.full_like(frames.pixels, 255))

    return Media("image", f"blank for {image.name}", load)
