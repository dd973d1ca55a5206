"""Samples of a run for its page: which rows are shown, and how prompt, answer and rewards are laid out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mmrl.config.schema import ConfigError
from mmrl.data.media import opened_image
from mmrl.reporting.html.charts import spelled
from mmrl.reporting.html.page import check_number, templates
from mmrl.reporting.thumbnails import data_uri

log = logging.getLogger("mmrl")

STEPS = 6  # collections of which samples are shown: the first, the last, some between
ROWS = 24  # samples of each: the best, the worst, some between
LETTERS = 1500  # of a text; more is cut
WORST, BEST = (194, 37, 92), (43, 138, 62)  # colours of the least and the greatest reward


@dataclass(frozen=True)
class Sample:
    """One row of a collection; images are JPEG."""

    step: int
    prompt: str
    completion: str
    reward: float
    advantage: float
    length: int
    rewards: Mapping[str, float]
    on_policy: bool = True
    seen: bytes | None = field(default=None, repr=False)  # of the prompt
    made: bytes | None = field(default=None, repr=False)  # of the answer


def read_samples(folder: Path, weights: Mapping[str, float]) -> list[Sample]:
    """Read samples of some collections of a run, the best first.

    Collections and rows with images are preferred. `weights` add up the rewards of rows without their sum.
    """
    from pyarrow import parquet

    files: dict[int, list[Path]] = {}
    with_images: set[int] = set()
    for path in sorted((folder / "completions").glob("completions_*.parquet")):
        step = path.stem.split("_")[1].split("-")[0]
        if not step.isdecimal():
            raise ConfigError(f"'{path}' names no step; a run calls them completions_000012.parquet")
        if schema := _readable(path, parquet.read_schema):
            files.setdefault(int(step), []).append(path)
            with_images |= {int(step)} if {"seen", "made"} & set(schema.names) else set()
    samples = []
    for step in spread_over(sorted(with_images or files), STEPS):
        rows = [row for path in files[step] for row in _read(path, step, weights)]
        rows = [row for row in rows if row.seen is not None or row.made is not None] or rows
        samples += spread_over(sorted(rows, key=_worth, reverse=True), ROWS)
    return sorted(samples, key=_worth, reverse=True)


def _worth(sample: Sample) -> float:
    return sample.reward if math.isfinite(sample.reward) else -math.inf


def spread_over(items: Sequence[Any], most: int) -> list[Any]:
    """Choose `most` items at equal distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _readable(path: Path, read: Callable[[Path], Any]) -> Any:
    """Read a file; a damaged one is skipped with a warning that names it."""
    from pyarrow import ArrowException

    try:
        return read(path)
    except (OSError, ArrowException) as error:
        log.warning("'%s' cannot be read and is left out: %s", path, " ".join(str(error).split())[:200])
        return None


def _read(path: Path, step: int, weights: Mapping[str, float]) -> list[Sample]:
    from pyarrow import parquet

    rows = []
    table = _readable(path, parquet.read_table)
    for number, row in enumerate(table.to_pylist() if table else ()):
        _check(row, f"{path}[{number}]")
        rewards = {n[7:]: math.nan if v is None else v for n, v in row.items() if n.startswith("reward/")}
        known = [weights.get(name, 1.0) * value for name, value in rewards.items() if math.isfinite(value)]
        rows.append(
            Sample(
                step=step,
                prompt=row["prompt"] or "",
                completion=row["completion"] or "",
                reward=row.get("reward", sum(known) if known else math.nan),
                advantage=row["advantage"],
                length=row["length"],
                rewards=rewards,
                on_policy=row["on_policy"],
                seen=row.get("seen"),
                made=row.get("made"),
            )
        )
    return rows


def _check(row: Mapping[str, Any], place: str) -> None:
    """Raise unless every column has the type that a run writes."""
    for name in ("advantage", "length", "on_policy"):
        check_number(row.get(name), place, name)
    for name, value in row.items():
        if name == "reward" or (name.startswith("reward/") and value is not None):
            check_number(value, place, name)
        elif name in ("prompt", "completion", "seen", "made"):
            kind = str if name in ("prompt", "completion") else bytes
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{place}: '{name}' must be {kind.__name__}, not {str(value)[:80]!r}")


# ---- drawing


def samples_section(samples: Sequence[Sample]) -> Markup:
    """Lay out samples with filters over them: by step, by words, by reward, advantage or length."""
    if not samples:
        return Markup()
    names = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
    known = [sample.reward for sample in samples if math.isfinite(sample.reward)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    # Many samples share the image of their prompt, so each is written once, as a background.
    images = {sample.seen: f"s{i}" for i, sample in enumerate(samples) if sample.seen is not None}
    cards = []
    for sample in samples:
        parts = [sample.rewards.get(name, math.nan) for name in names]
        numbers = (("reward", sample.reward), ("advantage", sample.advantage), ("length", sample.length))
        facts = [f"{name} {spelled(value)}" for name, value in sample.rewards.items()]
        facts = facts * (len(facts) > 1)  # a single reward is the sum, which is shown already
        facts += [f"advantage {sample.advantage:+.2f}", f"length {sample.length:,}"]
        facts += ["not sampled by the policy"] * (not sample.on_policy)
        cards.append(
            {
                "step": sample.step,
                "mark": _colour(sample.reward, low, high),
                "data": [(name, f"{value:.6g}") for name, value in numbers]
                + [(f"r{i}", f"{value:.4g}") for i, value in enumerate(parts)],
                "reward": spelled(sample.reward),
                "facts": facts,
                "prompt": _cut(sample.prompt),
                "completion": _cut(sample.completion),
                "seen": (images[sample.seen], *_size(sample.seen)) if sample.seen is not None else None,
                "made": data_uri(sample.made) if sample.made is not None else None,
            }
        )
    keys = [(key, key) for key in ("reward", "advantage", "length")]
    page = (
        templates()
        .get_template("samples.j2")
        .render(
            cards=cards,
            images=[(name, data_uri(image)) for image, name in images.items()],
            steps=sorted({sample.step for sample in samples}),
            keys=keys + [(f"r{i}", name) for i, name in enumerate(names)],
        )
    )
    return Markup(page)


def _cut(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[:LETTERS]} … ({len(text) - LETTERS} letters more)"


def _colour(reward: float, low: float, high: float) -> str:
    """Mix the colour of a sample's mark, from red for the least reward to green for the greatest."""
    if not math.isfinite(reward):
        return "#8a97a5"
    share = (reward - low) / (high - low) if high > low else 1.0
    return "rgb({},{},{})".format(*(round(a + share * (b - a)) for a, b in zip(WORST, BEST, strict=True)))


def _size(image: bytes) -> tuple[int, int]:
    with opened_image(image, "seen") as opened:
        return opened.size
