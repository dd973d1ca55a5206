"""Metric of how much greedy answers depend on batch size, number of processes or device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.registry import metric
from mmrl.core.reward_table import RewardTable
from mmrl.core.tensor import cat_padded
from mmrl.data.dataset_io import Rows

NAN = math.nan


@metric(notes={"token", "logp"})
@dataclass(eq=False)
class Divergence:
    """Compare greedy answers with those of other evaluations of the same prompts.

    The evaluations differ in the batch size, the number of processes or the device, and sample at
    temperature 0. An answer diverges if not all evaluations have the same tokens. The metrics (LayerCast,
    arXiv 2506.09501), with `label/` before their names:

    - `share`: fraction of answers that diverge.
    - `index`: number of equal tokens before the first difference, averaged over diverging answers.
    - `top1_std`: standard deviation over evaluations of the chosen token's probability, averaged over the
      tokens before the first difference, then over answers.
    - `length_std`: standard deviation over evaluations of the number of tokens, averaged over answers.
    - `accuracy_std`: standard deviation over evaluations of the mean of the reward `of`.

    Standard deviations are unbiased (our reading).

    Args:
        against: Files of the other evaluations, one or one pattern each: `runs/a/predictions.parquet`, or
            `runs/a/predictions-*.parquet` after several processes. They must have this metric too, so that
            tokens are recorded; the first evaluation leaves `against` empty, and its values are NaN.
        of: Name of the reward of `accuracy_std`; empty: without this metric.
        label: Prefix of the names of the metrics.
    """

    _: KW_ONLY
    against: tuple[str, ...] = ()
    of: str = ""
    label: str = "divergence"

    @cached_property
    def recorded(self) -> list[Any]:
        """The answers of the other evaluations, read lazily, so that a configuration check reads no files."""
        return [recorded_answers(path, self.of) for path in self.against]

    def __call__(self, table: RewardTable) -> dict[str, float]:
        """Compute the metrics of the answers in a table."""
        keys, seen = [], {}
        for uid, group in zip(table.uids, table.group.tolist(), strict=True):
            seen[group] = seen.get(group, -1) + 1
            keys.append((uid, seen[group]))
        notes, scores = table.notes, [float(table.at_end(self.of).nanmean())] if self.of else []
        sources = [(notes["token"], notes["logp"].exp())]
        for path, (where, tokens, chance, score) in zip(self.against, self.recorded, strict=True):
            missing = [uid for uid, copy in keys if (uid, copy) not in where]
            if missing:
                raise ConfigError(f"'{path}' has no answer to '{missing[0]}', or fewer of them")
            rows = torch.tensor([where[key] for key in keys])
            sources.append((tokens[rows], chance[rows]))
            scores += [float(score[rows].nanmean())] if self.of else []
        values = measure(sources) if self.against else dict.fromkeys(NAMES, NAN)
        if self.of:
            values["accuracy_std"] = float(torch.tensor(scores).double().std()) if self.against else NAN
        return {f"{self.label}/{name}": value for name, value in values.items()}


NAMES = ("share", "index", "top1_std", "length_std")


def measure(sources: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Compute the metrics from evaluations' tokens and probabilities (N, T), NaN after an answer's end."""
    sizes = [len(tokens) for tokens, _ in sources]
    tokens, chance = (cat_padded(each, NAN).split(sizes) for each in zip(*sources, strict=True))
    tokens, chance = torch.stack(tokens), torch.stack(chance)  # (evaluations, N, T)
    same = ((tokens == tokens[0]) | (tokens.isnan() & tokens[0].isnan())).all(0)
    before = same.long().cumprod(-1).bool()  # (N, T) mask of tokens before the first difference
    diverged = ~same.all(-1)
    std = torch.where(before, chance.std(0), NAN).nanmean(-1)  # NaN if the first tokens differ
    return {
        "share": float(diverged.double().mean()),
        "index": float(before[diverged].sum(-1).double().mean()),
        "top1_std": float(std.nanmean()),
        "length_std": float((~tokens.isnan()).sum(-1).double().std(0).mean()),
    }


def recorded_answers(path: str, of: str) -> tuple[Mapping[tuple[str, int], int], Tensor, Tensor, Tensor]:
    """Read the answers of an evaluation; raise ConfigError where tokens or the reward were not recorded.

    Returns:
        A mapping from (uid, number of the answer) to the row of the answer; tokens and probabilities (N, T),
        both with NaN after an answer's end; and rewards (N,).
    """
    columns = ["uid", "note/token", "note/logp", *([f"reward/{of}"] if of else [])]
    rows: list[Mapping[str, Any]] = [row.columns for row in Rows(Path(path), Path()).valid()]
    for name in columns:
        if not rows or name not in rows[0]:
            raise ConfigError(f"'{path}' has no column '{name}'; evaluate with `compression.divergence`")
    where, seen = {}, {}
    for at, row in enumerate(rows):
        seen[row["uid"]] = seen.get(row["uid"], -1) + 1
        where[row["uid"], seen[row["uid"]]] = at
    notes = [
        cat_padded([torch.tensor([row[f"note/{name}"]]).double() for row in rows], NAN)
        for name in ("token", "logp")
    ]
    scores = [row[columns[-1]] if of else NAN for row in rows]
    return where, notes[0], notes[1].exp(), torch.tensor([NAN if s is None else s for s in scores]).double()
