"""The samples in a run's page: prompts, answers and rewards of some training steps."""

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
from mmrl.reporting.answers import check_row
from mmrl.reporting.html.charts import diverging
from mmrl.reporting.html.layout import templates
from mmrl.reporting.thumbnails import illustrated

log = logging.getLogger("mmrl")

STEPS = 6  # number of training steps with samples, evenly spaced
ROWS = 24  # number of samples per step, evenly spaced by reward rank
MEDIA = {"seen", "heard", "made"}  # columns with images and sounds
REQUIRED = ("advantage", "length", "on_policy")  # columns without missing values


@dataclass(frozen=True)
class Sample:
    """One rollout of a training step; images are JPEG."""

    step: int
    prompt: str
    completion: str
    reward: float
    advantage: float
    length: int  # tokens, or denoising steps
    rewards: Mapping[str, float]  # unweighted rewards by name; NaN if a reward does not apply
    target: str = ""
    on_policy: bool = True
    seen: bytes | None = field(default=None, repr=False)  # thumbnail of the prompt
    heard: bytes | None = field(default=None, repr=False)  # sound of the prompt, WAV
    made: bytes | None = field(default=None, repr=False)  # thumbnail of the answer
    conversation: str = ""  # text of all turns after the prompt, if there are tools
    shown: Sequence[bytes] = field(default=(), repr=False)  # images from tools

    @property
    def turns(self) -> list[str | bytes]:
        """Texts and images of a conversation with tools, after the prompt."""
        return illustrated(self.conversation, self.shown) if self.conversation else []

    @property
    def rank(self) -> float:
        """Sort key: the reward; unknown rewards come last."""
        return self.reward if math.isfinite(self.reward) else -math.inf


def read_samples(folder: Path, weights: Mapping[str, float]) -> list[Sample]:
    """Read rollouts of some training steps, highest reward first; prefer steps and rows with media.

    `weights` maps reward names to weights; the sum is used for rows without the column `reward`.
    """
    from pyarrow import parquet

    files: dict[int, list[Path]] = {}
    with_images: set[int] = set()
    for path in sorted((folder / "completions").glob("completions_*.parquet")):
        step = path.stem.split("_")[1].split("-")[0]
        if not step.isdecimal():
            raise ConfigError(f"'{path}' names no step; a run calls them completions_000012.parquet")
        if schema := read_or_skip(path, parquet.read_schema):
            files.setdefault(int(step), []).append(path)
            with_images |= {int(step)} if MEDIA & set(schema.names) else set()
    samples = []
    for step in spread_over(sorted(with_images or files), STEPS):
        rows: list[Sample] = []
        for path in files[step]:
            table = read_or_skip(path, parquet.read_table)
            columns = table.to_pylist() if table else ()
            rows += [sample_of(row, step, f"{path}[{i}]", weights) for i, row in enumerate(columns)]
        rows = [row for row in rows if any(getattr(row, name) is not None for name in MEDIA)] or rows
        samples += spread_over(sorted(rows, key=lambda row: row.rank, reverse=True), ROWS)
    return sorted(samples, key=lambda sample: sample.rank, reverse=True)


def spread_over(items: Sequence[Any], most: int) -> list[Any]:
    """Select up to `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def read_or_skip(path: Path, read: Callable[[Path], Any]) -> Any:
    """Read a file; if it is damaged, log a warning and return None."""
    from pyarrow import ArrowException

    try:
        return read(path)
    except (OSError, ArrowException) as error:
        log.warning("'%s' cannot be read and is left out: %s", path, " ".join(str(error).split())[:200])
        return None


def sample_of(row: Mapping[str, Any], step: int, place: str, weights: Mapping[str, float]) -> Sample:
    """Create a sample from a row of parquet; raise ConfigError if a column has a wrong type."""
    check_row(row, place, (*REQUIRED, *({"reward"} & row.keys())))
    rewards = {n[7:]: math.nan if v is None else v for n, v in row.items() if n.startswith("reward/")}
    weighted = [weights.get(name, 1.0) * value for name, value in rewards.items() if math.isfinite(value)]
    return Sample(
        step=step,
        prompt=row["prompt"] or "",
        completion=row["completion"] or "",
        target=row.get("target") or "",
        reward=row.get("reward", sum(weighted) if weighted else math.nan),
        rewards=rewards,
        conversation=str(row.get("conversation") or ""),
        shown=row.get("shown") or (),
        **{name: row.get(name) for name in (*REQUIRED, *MEDIA)},
    )


def samples_section(samples: Sequence[Sample]) -> Markup:
    """Render samples, with filters by step, text, reward, advantage and length."""
    if not samples:
        return Markup()
    most = max((abs(s.advantage) for s in samples if math.isfinite(s.advantage)), default=0.0)

    def size(image: bytes) -> tuple[int, int]:
        with opened_image(image, "seen") as opened:
            return opened.size

    page = templates().get_template("samples.j2")
    html = page.render(
        samples=samples,
        names=list(dict.fromkeys(name for sample in samples for name in sample.rewards)),
        # Samples of one prompt share its image, so it is written once, as a CSS background.
        images={
            sample.seen: (f"s{i}", *size(sample.seen)) for i, sample in enumerate(samples) if sample.seen
        },
        # Only the first sample of a prompt contains its sound; the script copies it to the others.
        first={sample.heard: i for i, sample in reversed([*enumerate(samples)]) if sample.heard},
        nan=math.nan,
        colour=lambda advantage: diverging(advantage, most),
        most=most,
    )
    return Markup(html)
