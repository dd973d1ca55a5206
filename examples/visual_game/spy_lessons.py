"""Pairs of easy-VQA images for "who is the spy", and lessons in the words of the game."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from examples.visual_qa.easy_vqa import COLOURS, SHAPES, package, shape_and_colour
from mmrl.config.ranges import PositiveInt, Probability
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Media, Message, Part, Prompt
from mmrl.data.dataset_io import write_rows
from mmrl.vision.games.spy import Spy

TEMPLATE = "{{ role }}{% for number, clue in clues %} {{ number }} {{ clue }}{% endfor %} {{ stage }}?"
Looks = tuple[str, str]  # shape and colour


class ShortSpy(Spy):
    """The game for four players and one round, in few words: `voter 1 red circle 2 red circle decide?`."""

    def __init__(self) -> None:
        super().__init__(civilians=3, rounds=1, template=TEMPLATE)


@builder
@dataclass(kw_only=True)
class SpyLessons:
    """Write pairs of images that differ in shape or in colour, and lessons of the questions and of the game.

    `{train,test}_pairs.jsonl` are rows for `vision.image_pairs`: every image with one of which either the
    shape or the colour is another (the place is, too, but no word of the game names it). `lessons.jsonl` are
    rows for `vision.visual_qa` about the first `labelled` training images, which are in no pair: questions of
    easy-VQA, and turns of games between players that follow a rule. `test.jsonl` has the questions of the
    test images.

    Args:
        source: The package's folder `data`; by default that of the installed package.
        labelled: Training images with lessons.
        games: Games that lessons are taken from.
        bluff: Share of spies that repeat an earlier clue.
        slip: Share of civilians that describe another image.
    """

    stream: Stream
    source: str = ""
    labelled: PositiveInt = 1000
    games: PositiveInt = 2000
    bluff: Probability = 0.3
    slip: Probability = 0.1

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
                if n in shown
            ]
            paired = known[self.labelled :] if split == "train" else known
            generator = self.stream.fixed("pairs", split)
            pairs = self._pairs({n: looks[n] for n in paired}, generator)
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

    def _pairs(self, looks: Mapping[int, Looks], generator: Generator) -> list[tuple[int, int]]:
        """Pair every image with one that differs in shape or colour alone."""
        by_looks: dict[Looks, list[int]] = {}
        for number, seen in looks.items():
            by_looks.setdefault(seen, []).append(number)
        pairs = []
        for number, seen in looks.items():
            others = by_looks[changed(seen, generator, set(by_looks))]
            pairs.append((number, others[int(torch.randint(len(others), (), generator=generator))]))
        return pairs

    def _games(self, looks: Mapping[int, Looks]) -> list[dict[str, Any]]:
        """Play games by rule, and write every turn down as a question with its answer."""
        generator, rows = self.stream.fixed("games"), []
        pairs = self._pairs(looks, generator)
        for number in range(self.games):
            images = pairs[number % len(pairs)]
            rows += self._game(number, images, [looks[image] for image in images], generator)
        return rows

    def _game(
        self, number: int, images: Sequence[int], looks: Sequence[Looks], generator: Generator
    ) -> list[dict[str, Any]]:
        game, rows = ShortSpy(), []
        media = [Media("image", image("train", name), no_pixels) for name in images]
        state = game.begin(Prompt("", (Message("user", tuple(Part(media=one) for one in media)),)), generator)
        while players := game.acting(state):
            seen = state
            for player in players:
                (message,) = game.observe(seen, player)
                tags = game.tags(seen, player)
                own = looks[tags["role"] == "spy"]
                if tags["stage"] == "decide":
                    answer = vote(seen.clues, own, generator)
                else:
                    answer = self._clue(tags["role"], own, seen.clues, generator)
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

    def _clue(self, role: str, own: Looks, clues: Sequence[tuple[int, str]], generator: Generator) -> str:
        """Describe an image; some spies repeat what they heard, some civilians are wrong."""
        chance = float(torch.rand((), generator=generator))
        if role == "spy" and clues and chance < self.bluff:
            return clues[int(torch.randint(len(clues), (), generator=generator))][1]
        if role == "civilian" and chance < self.slip:
            own = changed(own, generator)
        return words(own)


def words(looks: Looks) -> str:
    """Name colour and shape."""
    return f"{looks[1]} {looks[0]}"


def vote(clues: Sequence[tuple[int, str]], own: Looks, generator: Generator) -> str:
    """Return a player whose clue does not fit the image; any player where all fit."""
    odd = [player for player, clue in clues if clue != words(own)] or [player for player, _ in clues]
    return str(odd[int(torch.randint(len(odd), (), generator=generator))])


def changed(looks: Looks, generator: Generator, known: set[Looks] | None = None) -> Looks:
    """Draw another shape or another colour; of those that are `known`, if given."""
    shape, colour = looks
    others = [(other, colour) for other in SHAPES if other != shape]
    others += [(shape, other) for other in COLOURS if other != colour]
    others = [other for other in others if known is None or other in known]
    return others[int(torch.randint(len(others), (), generator=generator))]


def image(split: str, number: int) -> str:
    """Name the file of an image."""
    return f"images/{split}/{number}.png"


def no_pixels() -> Frames:
    """Stand for an image that no rule looks at."""
    raise NotImplementedError
