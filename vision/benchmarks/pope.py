"""Building questions of POPE (arXiv 2305.10355): is an object there? Every other one is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, Literal

import torch

TEMPLATE = "Is there {} in the image?"


def with_article(name: str) -> str:
    """Put a or an before a name, by its first letter."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def build_questions(
    pictures: Mapping[str, Sequence[str]],
    strategy: Literal["random", "popular", "adversarial"],
    generator: torch.Generator,
    *,
    num_images: int = 500,
    num_objects: int = 3,
    template: str = TEMPLATE,
) -> list[dict[str, Any]]:
    """Ask about the first `num_objects` objects of pictures that have as many, and after each about one that
    is not there, in the rows of POPE's files.

    What is not there is drawn from all objects of the set (`random`), the most frequent one (`popular`), or
    the one that most often stands with the object asked for before (`adversarial`); never one that was asked
    for this picture. Where these name nothing it is drawn at random. Ties go by the alphabet.
    """
    objects = {name: list(dict.fromkeys(listed)) for name, listed in pictures.items()}
    often = Counter(one for listed in objects.values() for one in listed)
    together: dict[str, Counter] = {one: Counter() for one in often}
    for listed in objects.values():
        for one, other in permutations(listed, 2):
            together[one][other] += 1
    ranked = {"random": lambda one: [], "popular": lambda one: _by_count(often)}
    candidates = ranked.get(strategy, lambda one: _by_count(together[one]))
    full = [name for name, listed in objects.items() if len(listed) >= num_objects]
    drawn = torch.randperm(len(full), generator=generator)[:num_images].tolist()
    rows: list[dict[str, Any]] = []
    for name in (full[i] for i in drawn):
        taken = set(objects[name])
        for one in objects[name][:num_objects]:
            other = next((c for c in candidates(one) if c not in taken), None)
            other = other or _draw(sorted(set(often) - taken), generator, name)
            taken.add(other)
            for asked, label in ((one, "yes"), (other, "no")):
                text = template.format(with_article(asked))
                rows.append({"question_id": len(rows) + 1, "image": name, "text": text, "label": label})
    return rows


def _by_count(counter: Counter) -> list[str]:
    return sorted(counter, key=lambda one: (-counter[one], one))


def _draw(left: list[str], generator: torch.Generator, name: str) -> str:
    if not left:
        raise ValueError(f"every object of the set was asked for picture '{name}'; ask for fewer objects")
    return left[int(torch.randint(len(left), (), generator=generator))]
