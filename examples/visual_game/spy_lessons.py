"""Pairs of easy-VQA images for "who is the spy", and lessons in the words of the game."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Generator

from examples.visual_qa.easy_vqa import COLOURS, SHAPES, package, shape_and_colour
from mmrl.config.ranges import PositiveInt, Probability
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Media, Message, Part, Prompt
from mmrl.data.dataset_io import write_rows
from mmrl.vision.games.spy import Spy, SpyState

T = TypeVar("T")
Looks = tuple[str, str]  # shape and colour
Clues = Sequence[tuple[int, str]]  # players and what they said
TEMPLATE = "{{ role }}{% for number, clue in clues %} {{ clue }}{% endfor %} {{ stage }}?"


class ShortSpy(Spy):
    """The game for one spy and a few civilians and one round, in few words: `voter red red blue decide?`.

    A vote repeats a clue, and is for the first player who gave it; one that repeats none is not valid.
    Rewards of clues are ten times the paper's, as large as those of votes.

    Args:
        civilians: Number of players besides the spy.
    """

    def __init__(self, *, civilians: PositiveInt = 2) -> None:
        super().__init__(civilians=civilians, rounds=1, beta=1.0, lam=1.0, template=TEMPLATE)

    def act(self, state: SpyState, player: str, answer: str) -> SpyState:
        """Add a clue, or the vote for who gave it."""
        if self.tags(state, player)["stage"] == "decide":
            said = answer.strip()
            answer = next((str(number) for number, clue in state.clues if clue == said), "")
        return super().act(state, player, answer)


@builder
@dataclass(kw_only=True)
class SpyLessons:
    """Write pairs of images that differ in colour, and lessons of the questions and of the game.

    `{train,test}_pairs.jsonl` are rows for `vision.image_pairs`: every image with one of the same shape in
    another colour (the place differs, too, but no word of the game names it). `lessons.jsonl` are rows for
    `vision.visual_qa` about the first `labelled` training images, which are in no pair: the questions of
    easy-VQA that the colour answers, and turns of games between players that follow a rule and make mistakes.
    `test.jsonl` has such questions about the test images.

    Args:
        source: The package's folder `data`; by default that of the installed package.
        labelled: Training images with lessons.
        games: Games that lessons are taken from.
        bluff: Share of spies that repeat an earlier clue.
        slip: Share of civilians that name any colour.
        guess: Share of votes for any player.
        civilians: Civilians of a game.
    """

    stream: Stream
    source: str = ""
    labelled: PositiveInt = 400
    games: PositiveInt = 1000
    bluff: Probability = 0.2
    slip: Probability = 0.1
    guess: Probability = 0.5
    civilians: PositiveInt = 2

    def build(self, output: Path) -> dict[str, Any]:
        """Copy the images and write the rows; return their numbers."""
        source = Path(self.source) if self.source else package()
        counts: dict[str, Any] = {}
        for split in ("train", "test"):
            asked = [tuple(row) for row in json.loads((source / split / "questions.json").read_text())]
            shutil.copytree(source / split / "images", output / "images" / split, dirs_exist_ok=True)
            looks = shape_and_colour(asked)
            known = sorted(looks)
            shown = set(known[: self.labelled]) if split == "train" else {number for *_, number in asked}
            rows = [
                {"id": f"{split}#{i}", "image": image(split, n), "question": q, "answer": a}
                for i, (q, a, n) in enumerate(asked)
                if n in shown and about_colour(q, a)
            ]
            paired = known[self.labelled :] if split == "train" else known
            pairs = pairs_of({n: looks[n] for n in paired}, self.stream.fixed("pairs", split))
            counts[f"{split}_pairs"] = write_rows(
                output / f"{split}_pairs.jsonl",
                (
                    {"id": f"{a}-{b}", "original": image(split, a), "changed": image(split, b)}
                    for a, b in pairs
                ),
            )
            if split == "train":
                rows += self._games({n: looks[n] for n in known[: self.labelled]})
            name = "lessons" if split == "train" else "test"
            counts[name] = write_rows(output / f"{name}.jsonl", rows)
        return counts

    def _games(self, looks: Mapping[int, Looks]) -> list[dict[str, Any]]:
        """Play games by rule, and write every turn down as a question with its answer."""
        generator, rows = self.stream.fixed("games"), []
        pairs = pairs_of(looks, generator)
        for number in range(self.games):
            rows += self._game(number, pairs[number % len(pairs)], looks, generator)
        return rows

    def _game(
        self, number: int, pair: Sequence[int], looks: Mapping[int, Looks], generator: Generator
    ) -> list[dict[str, Any]]:
        game, rows = ShortSpy(civilians=self.civilians), []
        media = [Media("image", image("train", name), no_pixels) for name in pair]
        state = game.begin(Prompt("", (Message("user", tuple(Part(media=one) for one in media)),)), generator)
        while players := game.acting(state):
            seen = state
            for player in players:
                (message,) = game.observe(seen, player)
                role = game.tags(seen, player)["role"]
                _, colour = looks[pair[role == "spy"]]
                answer = self._answer(role, colour, seen.clues, generator)
                rows.append(
                    {
                        "id": f"game {number} turn {len(rows)}",
                        "image": message.parts[0].media.name,
                        "question": message.parts[1].text,
                        "answer": answer,
                    }
                )
                state = game.act(state, player, answer)
        return rows

    def _answer(self, role: str, colour: str, clues: Clues, generator: Generator) -> str:
        """Name the colour, or vote for a clue that names another; sometimes make the mistake of the role."""
        chance = float(torch.rand((), generator=generator))
        if role == "voter":
            return vote(clues, "" if chance < self.guess else colour, generator)
        if role == "spy" and clues and chance < self.bluff:
            return drawn([clue for _, clue in clues], generator)
        if role == "civilian" and chance < self.slip:
            return drawn(COLOURS, generator)
        return colour


def about_colour(question: str, answer: str) -> bool:
    """Return whether the colour of an image answers a question."""
    return answer in COLOURS or not {answer, *re.findall("[a-z]+", question)} & set(SHAPES)


def pairs_of(looks: Mapping[int, Looks], generator: Generator) -> list[tuple[int, int]]:
    """Pair every image with one of the same shape in another colour, where there is one."""
    others = {
        seen: [n for n, (shape, colour) in looks.items() if shape == seen[0] and colour != seen[1]]
        for seen in set(looks.values())
    }
    return [(n, drawn(others[seen], generator)) for n, seen in looks.items() if others[seen]]


def vote(clues: Clues, colour: str, generator: Generator) -> str:
    """Return a clue that is not the colour; any clue where all are."""
    return drawn([clue for _, clue in clues if clue != colour] or [clue for _, clue in clues], generator)


def drawn(choices: Sequence[T], generator: Generator) -> T:
    """Draw one of the choices."""
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def image(split: str, number: int) -> str:
    """Name the file of an image."""
    return f"images/{split}/{number}.png"


def no_pixels() -> Frames:
    """Stand for an image that no rule looks at."""
    raise NotImplementedError
