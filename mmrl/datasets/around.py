"""The data set `mixture`, which concatenates other data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmrl.config.loading import ConfigError
from mmrl.config.registry import data as dataset
from mmrl.core.types import Prompt

ReadData = Callable[[], Sequence[Prompt]]


@dataset
def mixture(*, data: tuple[ReadData, ...], sources: tuple[str, ...]) -> list[Prompt]:
    """Concatenate several data sets; the column `source` names the data set of each row.

    Ids get this name as a prefix: `gui/row-3`. With `where: {source: gui}`, a reward scores only the rows of
    one data set, so one run, even one batch, can have several tasks. The sampler draws from all rows equally.

    Args:
        data: The data sets.
        sources: A name for each data set.
    """
    if len(set(sources)) != len(data):
        raise ConfigError(
            f"`mixture` wants a name of its own in `sources` for each of {len(data)} data sets, got "
            f"{', '.join(sources) or 'none'}"
        )
    return [
        replace(prompt, uid=f"{source}/{prompt.uid}", columns={**prompt.columns, "source": source})
        for source, read in zip(sources, data, strict=True)
        for prompt in read()
    ]
