"""Which prompts a run asked, how often, how hard they were, and what its samplers believe: parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmrl.core.types import Prompt
from mmrl.data.row_prompts import uids_of
from mmrl.reporting.answers import write_columns

PROMPTS, BELIEFS = "prompts.parquet", "beliefs.parquet"
TOTAL, OTHERS = b"prompts", b"others"  # in the metadata: prompts of the data set, and asked ones outside it
TEXT = 300  # letters of a prompt that are written
COUNTED = ("asked", "rollouts", "mean", "first", "last", "step")  # columns besides the id and the text

Beliefs = Mapping[str, Mapping[str, float]]  # id of a prompt, or name of a source: named numbers


def write_prompts(
    folder: Path,
    data: Sequence[Prompt],
    columns: Mapping[str, list],
    beliefs: Mapping[str, Beliefs],
) -> None:
    """Write `prompts.parquet`, and `beliefs.parquet` where a sampler has beliefs, whole or not at all.

    Args:
        folder: Output folder of the run.
        data: The data set, for the texts.
        columns: `uid` and `COUNTED` of every prompt that was asked.
        beliefs: By the place of the sampler in the configuration.
    """
    wanted = set(columns["uid"])
    texts = {uid: data[i].text[:TEXT] for i, uid in enumerate(uids_of(data)) if uid in wanted}
    # Replayed rows, and prompts that a sampler changed, may have ids that the data set does not have.
    table = {**columns, "text": [texts.get(uid, "") for uid in columns["uid"]]}
    counts = {TOTAL: len(data), OTHERS: len(wanted - texts.keys())}
    write_columns(folder / PROMPTS, table, {name: str(count).encode() for name, count in counts.items()})
    if beliefs:
        listed = [
            (place, about, name, float(value))
            for place, held in beliefs.items()
            for about, numbers in held.items()
            for name, value in numbers.items()
        ]
        names = ("sampler", "about", "name", "value")
        write_columns(folder / BELIEFS, {n: [row[i] for row in listed] for i, n in enumerate(names)})
