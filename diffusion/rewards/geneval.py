"""Whether a picture shows the objects that its prompt asks for: count, colour, position (GenEval, arXiv
2310.11513)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import imported, picture_of

# Class to what was found of it: {"box": [left, top, right, bottom], "score": confidence, "color": name}.
Detections = Mapping[str, Sequence[Mapping[str, Any]]]
Clauses = Sequence[
    Mapping[str, Any]
]  # {"class", "count", and perhaps "color" and "position": [relation, clause]}

CONFIDENCE, COUNTING_CONFIDENCE = 0.3, 0.9
MOST = 16  # objects of a class
MARGIN = 0.1  # of the sizes of two boxes, within which they are not apart
LEAN = 0.5  # of the length of the way between two boxes


@reward
class Geneval:
    """Measure how many of a prompt's objects a picture shows, with their number, colour and position
    (GenEval, arXiv 2310.11513; as a reward Flow-GRPO, arXiv 2505.05470).

    `clauses` is the reward of training, the mean over what is asked; `strict` is 1 where all is right and
    numbers are exact; `official` is the benchmark's, where at least the number is enough except in prompts
    that ask for counting. A count above twice the number would be negative; `clamp` holds it at 0 (our
    reading). The prompt's columns `include`, `exclude` and `tag` are those of the benchmark.

    `detector` is `package.module:function` from a picture (3, height, width) uint8 and the prompt's columns
    to detections: class to a list of `{box: [left, top, right, bottom], score, color}`. Without it
    detections are read from the outcome's tag or the prompt's column `detections`, as JSON. Confidences up
    to 0.3 (0.9 for counting), and what comes behind 16 of a class, are left out. Of a clip the first frame
    counts.
    """

    def __init__(
        self,
        *,
        detector: str = "",
        form: Literal["clauses", "strict", "official"] = "clauses",
        clamp: bool = False,
    ) -> None:
        self.detect = imported("geneval", detector) if detector else None
        self.form, self.clamp = form, clamp

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        return [self._measure(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]

    def _measure(self, prompt: Prompt, outcome: Outcome) -> float:
        asked = prompt.columns
        if not asked.get("include"):
            raise ValueError(
                f"geneval needs the column `include` of the benchmark, which prompt '{prompt.uid}' lacks"
            )
        given = self.detect(picture_of(prompt, outcome), asked) if self.detect else _recorded(prompt, outcome)
        found = sure(given, asked.get("tag", ""))
        if self.form == "official":
            return float(official(found, asked))
        right, values = judge(found, asked["include"], exact=True)
        if self.form == "strict":
            return float(right)
        values = [max(value, 0.0) for value in values] if self.clamp else values
        return sum(values) / len(values)


def _recorded(prompt: Prompt, outcome: Outcome) -> Detections:
    given = outcome.tags.get("detections", prompt.columns.get("detections"))
    if given is None:
        raise ValueError(
            f"geneval found no detections for prompt '{prompt.uid}'; name a `detector`, or record them as "
            "JSON in the "
            "outcome's tag or the prompt's column `detections`"
        )
    return json.loads(given) if type(given) is str else given


def sure(detections: Detections, tag: str) -> dict[str, list[Mapping[str, Any]]]:
    """Keep the surest objects of every class, surest first."""
    bar = COUNTING_CONFIDENCE if tag == "counting" else CONFIDENCE
    return {
        name: sorted((one for one in found if one["score"] > bar), key=lambda one: -one["score"])[:MOST]
        for name, found in detections.items()
    }


def judge(found: Detections, clauses: Clauses, *, exact: bool) -> tuple[bool, list[float]]:
    """Tell whether all clauses hold, and rate what each asks: count, and colour or position.

    Without `exact` more objects than asked are no fault, and the surest of them are looked at. As in the
    source of the reward, a wrong position counts 0 and then 1: it earns half.
    """
    values: list[float] = []
    groups: list[Sequence | None] = []  # the objects of every clause that holds
    for clause in clauses:
        wanted = clause["count"]
        objects = found.get(clause["class"], [])
        objects = objects if exact else objects[:wanted]
        values.append(1 - abs(wanted - len(objects)) / wanted)
        right = len(objects) == wanted
        if not right and ("color" in clause or "position" in clause):
            values.append(0.0)
        if right and "color" in clause:
            painted = sum(_color(one, clause["class"]) == clause["color"] for one in objects)
            values.append(1 - abs(wanted - painted) / wanted)
            right = painted == wanted
        if right and "position" in clause:
            right, more = _placed(objects, clause["position"], groups)
            values += more
        groups.append(objects if right else None)
    return all(group is not None for group in groups), values


def _placed(
    objects: Sequence, position: Sequence, groups: Sequence[Sequence | None]
) -> tuple[bool, list[float]]:
    relation, target = position
    others = groups[target]
    if others is None:
        return False, [0.0]
    right = all(relation in relative_position(a["box"], b["box"]) for a in objects for b in others)
    return right, [1.0] if right else [0.0, 1.0]


def _color(one: Mapping[str, Any], name: str) -> str:
    if "color" not in one:
        raise ValueError(
            f"geneval asks for a colour, but the detector gives none for a '{name}'; it gives {sorted(one)}"
        )
    return one["color"]


def official(found: Detections, asked: Mapping[str, Any]) -> bool:
    """Tell whether the benchmark takes a picture for right."""
    right, _ = judge(found, asked["include"], exact=False)
    excluded = [(clause["class"], clause["count"]) for clause in asked.get("exclude") or ()]
    if asked.get("tag") == "counting":
        excluded += [(clause["class"], clause["count"] + 1) for clause in asked["include"]]
    return right and not any(len(found.get(name, ())) >= count for name, count in excluded)


def relative_position(box: Sequence[float], other: Sequence[float]) -> set[str]:
    """Tell where a box lies as seen from another: "left of", "right of", "above", "below", two of them, or
    nothing.

    The way between their centres is shortened on both axes by a tenth of both sizes, and divided by its full
    length; what is left of an axis beyond half counts.
    """
    way, apart = [], []
    for low, high in ((0, 2), (1, 3)):
        gap = (box[low] + box[high] - other[low] - other[high]) / 2
        margin = MARGIN * (abs(box[high] - box[low]) + abs(other[high] - other[low]))
        way.append(gap)
        apart.append(max(abs(gap) - margin, 0.0) * (1 if gap > 0 else -1))
    if max(map(abs, apart)) < 1e-3:
        return set()
    x, y = (shift / (way[0] ** 2 + way[1] ** 2) ** 0.5 for shift in apart)
    known = {"left of": x < -LEAN, "right of": x > LEAN, "above": y < -LEAN, "below": y > LEAN}
    return {relation for relation, holds in known.items() if holds}
