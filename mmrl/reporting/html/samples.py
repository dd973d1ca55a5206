"""Samples of a run, to be looked through by reward: what was asked, what was answered, what it was worth."""

from __future__ import annotations

import html
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config.schema import ConfigError
from mmrl.data.media import opened_image
from mmrl.reporting.html.charts import spelled
from mmrl.reporting.html.reading import check_number
from mmrl.reporting.thumbnails import source

log = logging.getLogger("mmrl")

STEPS = 6  # collections of which samples are shown: the first, the last, some between
ROWS = 24  # samples of each: the best, the worst, some between
LETTERS = 1500  # of a text; more is cut
WORST, BEST = (194, 37, 92), (43, 138, 62)  # colours of the least and the greatest reward


@dataclass(frozen=True)
class Sample:
    """One row of a collection."""

    step: int
    prompt: str
    completion: str
    reward: float
    advantage: float
    length: int
    rewards: Mapping[str, float]
    on_policy: bool = True
    seen: bytes | None = field(default=None, repr=False)  # picture of what was asked about
    made: bytes | None = field(default=None, repr=False)  # picture of the answer

    @property
    def pictured(self) -> bool:
        """Tell whether there is a picture."""
        return self.seen is not None or self.made is not None


def read_samples(folder: Path, weights: Mapping[str, float]) -> list[Sample]:
    """Read samples of some collections that a run wrote; rewards of runs without a column for their sum are
    added up by `weights`."""
    from pyarrow import parquet

    files: dict[int, list[Path]] = {}
    with_pictures: set[int] = set()
    for path in sorted((folder / "completions").glob("completions_*.parquet")):
        step = path.stem.split("_")[1].split("-")[0]
        if not step.isdecimal():
            raise ConfigError(f"'{path}' names no step; a run calls them completions_000012.parquet")
        if schema := _readable(path, parquet.read_schema):
            files.setdefault(int(step), []).append(path)
            with_pictures |= {int(step)} if {"seen", "made"} & set(schema.names) else set()
    chosen = spread_over(sorted(with_pictures or files), STEPS)
    found = []
    for step in chosen:
        rows = [row for path in files[step] for row in _read(path, step, weights)]
        rows = [row for row in rows if row.pictured] or rows
        found += spread_over(sorted(rows, key=_worth, reverse=True), ROWS)
    return sorted(found, key=_worth, reverse=True)


def _worth(sample: Sample) -> float:
    return sample.reward if math.isfinite(sample.reward) else -math.inf


def spread_over(things: Sequence[Any], most: int) -> list[Any]:
    """Choose at equal distances, the first and the last among them."""
    if len(things) <= most:
        return list(things)
    return [things[round(i * (len(things) - 1) / (most - 1))] for i in range(most)]


def _readable(path: Path, read: Callable[[Path], Any]) -> Any:
    """Read a file, or name it and leave it out."""
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
        rewards = {
            name[7:]: math.nan if value is None else value
            for name, value in row.items()
            if name.startswith("reward/")
        }
        known = [weights.get(name, 1.0) * value for name, value in rewards.items() if math.isfinite(value)]
        reward = row.get("reward", sum(known) if known else math.nan)
        rows.append(
            Sample(
                step,
                row["prompt"] or "",
                row["completion"] or "",
                reward,
                row["advantage"],
                row["length"],
                rewards,
                row["on_policy"],
                row.get("seen"),
                row.get("made"),
            )
        )
    return rows


def _check(row: Mapping[str, Any], place: str) -> None:
    """Refuse a row with anything else than a run writes."""
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


def samples_section(samples: Sequence[Sample]) -> str:
    """Show samples with a sieve above them: by step, by the words in them, by any of their rewards."""
    if not samples:
        return ""
    names = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
    known = [sample.reward for sample in samples if math.isfinite(sample.reward)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    pictures = {sample.seen: f"s{i}" for i, sample in enumerate(samples) if sample.seen is not None}
    # What was asked about is shared by many samples, so it is written once.
    rules = "".join(
        f".{name}{{background-image:url({source(picture)})}}" for picture, name in pictures.items()
    )
    style = f"<style>{rules}</style>" if rules else ""
    shown = "".join(_sample(sample, names, low, high, pictures) for sample in samples)
    steps = len({sample.step for sample in samples})
    note = (
        f"<p class=note>{len(samples)} samples of {steps} collection{'s' * (steps > 1)}, the best first. Of "
        "each collection the best, the worst and some between are shown; all rows lie in "
        "<code>completions/</code>.</p>"
    )
    more = "<button class=more type=button hidden>show more</button>"
    return f"{style}{note}{_sieve(samples, names)}<div class='rows samples'>{shown}</div>{more}"


def _sieve(samples: Sequence[Sample], names: Sequence[str]) -> str:
    steps = "".join(
        f"<option value={s}>{s + 1}</option>" for s in sorted({sample.step for sample in samples})
    )
    keys = [("reward", "reward"), ("advantage", "advantage"), ("length", "length")]
    keys += [(f"r{i}", name) for i, name in enumerate(names)]
    by = "".join(f"<option value={key}>{html.escape(name)}</option>" for key, name in keys)
    return (
        "<form class=sieve hidden>"
        f"<label>step <select name=step><option value=''>all</option>{steps}</select></label>"
        f"<label>by <select name=by>{by}</select></label>"
        "<label>order <select name=order><option value=down>best first</option><option value=up>worst first"
        "</option></select></label>"
        "<label>from <input name=least type=number step=any style='width:6em' aria-label=least> to "
        "<input name=most type=number step=any style='width:6em' aria-label=most></label>"
        "<label>with the words <input name=words type=search></label><output></output></form>"
    )


def _sample(
    sample: Sample, names: Sequence[str], low: float, high: float, pictures: Mapping[bytes, str]
) -> str:
    values = "".join(f" data-r{i}={sample.rewards.get(name, math.nan):.4g}" for i, name in enumerate(names))
    told = [f"<span>{html.escape(name)} {spelled(value)}</span>" for name, value in sample.rewards.items()]
    told = told if len(told) > 1 else []
    told.append(f"<span>advantage {sample.advantage:+.2f}</span>")
    told.append(f"<span>length {sample.length:,}</span>")
    told += [] if sample.on_policy else ["<span>not sampled by the policy</span>"]
    seen = ""
    if sample.seen is not None:
        width, height = _size(sample.seen)
        seen = (
            f"<i class='seen {pictures[sample.seen]}' role=img aria-label='what was asked about' "
            f"style='aspect-ratio:{width}/{height}'></i>"
        )
    made = f"<img alt='what was made' src='{source(sample.made)}'>" if sample.made is not None else ""
    answer = f"<p>{html.escape(_cut(sample.completion))}</p>" if sample.completion else ""
    return (
        f"<article class=sample style='--mark:{_colour(sample.reward, low, high)}' data-step={sample.step} "
        f"data-reward={sample.reward:.6g} data-advantage={sample.advantage:.6g} "
        f"data-length={sample.length:.6g}{values}>"
        f"<header><b>{spelled(sample.reward)}</b><span>step {sample.step + 1}</span>{''.join(told)}</header>"
        f"<p class=asked>{html.escape(_cut(sample.prompt))}</p>{seen}{answer}{made}</article>"
    )


def _cut(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[:LETTERS]} … ({len(text) - LETTERS} letters more)"


def _colour(reward: float, low: float, high: float) -> str:
    if not math.isfinite(reward):
        return "#8a97a5"
    share = (reward - low) / (high - low) if high > low else 1.0
    return "rgb({},{},{})".format(*(round(a + share * (b - a)) for a, b in zip(WORST, BEST, strict=True)))


def _size(picture: bytes) -> tuple[int, int]:
    with opened_image(picture, "seen") as image:
        return image.size
