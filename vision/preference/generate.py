"""Answering and scoring pictures, a shard at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.config.binding import Bound
from mmrl.core.protocols import Engine
from mmrl.core.types import Prompt, Trajectory
from mmrl.vision.media.prompts import ask
from mmrl.vision.media.video import MediaError
from mmrl.vision.preference.select import Pair
from mmrl.vision.preference.sources import Item, Pictures, as_media, digest_of, ending_of


@dataclass(frozen=True)
class Seen:
    """A picture that can be described: the prompt about it, its file, and the name of its bytes."""

    prompt: Prompt
    image: str
    digest: str


@dataclass(frozen=True)
class Maker:
    """Makes scored pairs of the answers of an engine. Pictures that rows hold are put into `kept`."""

    pictures: Pictures
    kept: Path
    engine: Engine
    reward: Bound
    choose_prompt: Callable[[Item], str]

    def pairs(self, items: Sequence[Item]) -> list[Pair]:
        """Answer and score pictures, in order."""
        faults, seen = {}, {}
        for place, item in enumerate(items):
            try:
                seen[place] = self._look(item)
            except _FaultError as error:
                faults[place] = error.pair
        asked = [one.prompt for one in seen.values() for _ in range(2)]
        rows = {one.prompt.uid: [] for one in seen.values()}
        for row in self.engine.rollout(asked) if asked else ():
            rows[row.prompt.uid].append(row)
        for uid, both in rows.items():
            if len(both) != 2:
                raise ValueError(f"the engine gave {len(both)} answers about '{uid}', not two")
            both.sort(key=lambda row: row.outcomes[-1].recorded.get("contrast_alpha", 0.0))
        answers = [row.outcomes[-1] for both in rows.values() for row in both]
        scored = iter(self.reward(asked, answers) if asked else ())
        made = {place: self._pair(one, rows[one.prompt.uid], scored) for place, one in seen.items()}
        return [faults[place] if place in faults else made[place] for place in range(len(items))]

    def _look(self, item: Item) -> Seen:
        """Read a picture and ask about it."""
        if item.named is None:
            raise _FaultError(Pair(item.place, fault="bad_row", what=item.fault))
        name, fault = item.named.path or item.place, "missing"
        try:
            data = self.pictures.bytes_of(item.named)
            fault = "unreadable"
            media = as_media(name, data)
        except MediaError as error:
            raise _FaultError(Pair(item.place, name, fault=fault, what=str(error))) from error
        digest = digest_of(data)
        if item.named.data:
            name = f"{digest}{ending_of(data)}"
            self.kept.mkdir(parents=True, exist_ok=True)
            (self.kept / name).write_bytes(data)
        return Seen(ask(item.place, [media], self.choose_prompt(item), None, {}), name, digest)

    def _pair(self, one: Seen, both: Sequence[Trajectory], scored: Iterator[float | None]) -> Pair:
        answers = [row.outcomes[-1] for row in both]
        texts = tuple(answer.text or "" for answer in answers)
        # An encoder knows what it reads at once; other rewards have no limit.
        whole = getattr(self.reward.function, "reads_whole", lambda text: True)
        numbers = [next(scored) for _ in answers]
        return Pair(
            place=one.prompt.uid,
            image=one.image,
            prompt=one.prompt.text,
            texts=texts,
            lengths=tuple(row.length for row in both),
            scores=tuple(None if number is None else float(number) for number in numbers),
            h=tuple(answer.recorded.get("contrast_alpha") for answer in answers),
            split=tuple(not whole(text) for text in texts),
            digest=one.digest,
        )


class _FaultError(Exception):
    """A picture that cannot be described, as the pair that stands for it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
