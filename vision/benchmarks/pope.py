"""POPE (arXiv 2305.10355): questions about present and absent objects, and parsing yes/no answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, Literal

import torch

from mmrl.config.reward_adapters import tagged

TEMPLATE = "Is there {} in the image?"
YES, NO, NEITHER = 1.0, 0.0, -1.0
Form = Literal["pope", "exact", "first_word"]
Strategy = Literal["random", "popular", "adversarial"]


def parse_yes_no(text: str, form: Form = "pope") -> float:
    """Parse a yes/no answer: 1 for yes, 0 for no, -1 for neither.

    `pope` parses as POPE's script does (arXiv 2305.10355): the text up to the first full stop means no if
    one of its words is No, no or not, else yes. So "Yes, there is no doubt." means no, and an empty answer
    means yes. `exact` accepts only Yes and No, spelt so, as AMBER's script does (arXiv 2311.07397).
    `first_word` takes the first yes or no of any case, in the last answer block if there is one.
    """
    if form == "pope":
        words = text.partition(".")[0].replace(",", "").split(" ")
        return NO if {"No", "no", "not"} & {*words} else YES
    if form == "exact":
        return {"Yes": YES, "No": NO}.get(text, NEITHER)
    blocks = tagged(text, "answer")
    word = re.search(r"\b(yes|no)\b", (blocks[-1] if blocks else text).lower())
    return NEITHER if word is None else YES if word[1] == "yes" else NO


def with_article(name: str) -> str:
    """Prefix a noun with a or an, by its first letter."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def build_questions(
    images: Mapping[str, Sequence[str]],
    strategy: Strategy,
    generator: torch.Generator,
    *,
    num_images: int = 500,
    num_objects: int = 3,
    template: str = TEMPLATE,
) -> list[dict[str, Any]]:
    """Generate POPE rows from `images`, which maps an image to the names of the objects in it.

    Asks about the first `num_objects` objects of images that have as many, and after each about an absent
    object: drawn from all objects of the data set (`random`), the most frequent one (`popular`), or the one
    that co-occurs most often with the object asked for before (`adversarial`); never one that was asked for
    this image. Where these yield nothing it is drawn at random. Ties are broken alphabetically.
    """
    objects = {image: list(dict.fromkeys(names)) for image, names in images.items()}
    frequency = Counter(name for names in objects.values() for name in names)
    together: dict[str, Counter] = {name: Counter() for name in frequency}
    for names in objects.values():
        for name, other in permutations(names, 2):
            together[name][other] += 1
    full = [image for image, names in objects.items() if len(names) >= num_objects]
    rows: list[dict[str, Any]] = []
    for i in torch.randperm(len(full), generator=generator)[:num_images].tolist():
        image = full[i]
        taken = set(objects[image])
        for present in objects[image][:num_objects]:
            counts = {"random": {}, "popular": frequency, "adversarial": together[present]}[strategy]
            ranked = sorted(counts, key=lambda name, counts=counts: (-counts[name], name))
            absent = next((name for name in ranked if name not in taken), None)
            if absent is None:
                rest = sorted(set(frequency) - taken)
                if not rest:
                    raise ValueError(f"no absent object is left for image '{image}'; ask for fewer objects")
                absent = rest[int(torch.randint(len(rest), (), generator=generator))]
            taken.add(absent)
            for name, label in ((present, "yes"), (absent, "no")):
                text = template.format(with_article(name))
                rows.append({"question_id": len(rows) + 1, "image": image, "text": text, "label": label})
    return rows
