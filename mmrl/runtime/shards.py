"""Shards on disk of a data set build, from which an interrupted build resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.config.schema import Piece
from mmrl.data.dataset_io import RowError
from mmrl.runtime.content_hash import of_files
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import write_whole

BUILD = ".build"
PAUSE = 1.0  # seconds between checks for the shards of other processes


class Shards:
    """Shards of rows in the folder `.build` of an output, one file of JSON lines each."""

    def __init__(self, output: Path) -> None:
        self.folder = output / BUILD

    def path(self, number: int) -> Path:
        """Return the path of a shard's file."""
        return self.folder / f"shard-{number:06d}.jsonl"

    def has(self, number: int) -> bool:
        """Whether a shard is finished, that is whether its file exists."""
        return self.path(number).is_file()

    def fill(
        self,
        numbers: Sequence[int],
        processes: Processes,
        plan: Callable[[], Mapping[str, Any]],
        generate: Callable[[list[int]], None],
    ) -> None:
        """Generate the missing shards on all processes, which divide them, and wait for all of them.

        Args:
            numbers: Numbers of all shards.
            processes: The processes of the build, which all call this method.
            plan: Returns the inputs of the build, see `agree`; called on process 0.
            generate: Writes the missing shards of this process, by number; not called if none is missing.
        """
        if processes.main:
            self.agree("plan", plan())
        # Process 0 decides for all, because other processes may already see newer shards.
        if not processes.all_gather_object(all(map(self.has, numbers)))[0]:
            generate([n for n in numbers[processes.rank :: processes.world] if not self.has(n)])
        for number in numbers:
            while not self.has(number):  # poll, since a collective would time out
                time.sleep(PAUSE)
        processes.wait()

    def write_rows(self, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows of a shard to its file atomically."""
        write_whole(self.path(number), "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))

    def read_rows(self, number: int) -> list[dict[str, Any]]:
        """Read the rows of a shard from its file."""
        with self.path(number).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def agree(self, name: str, plan: Mapping[str, Any]) -> None:
        """Record a build's inputs in its folder; raise `RowError` if they differ from recorded inputs."""
        text = json.dumps(plan, indent=1, ensure_ascii=False) + "\n"
        if not (self.folder / f"{name}.json").is_file():
            write_whole(self.folder / f"{name}.json", text)
        recorded, plan = self.recorded(name), json.loads(text)  # via JSON, which turns tuples into lists
        other = [key for key in {**plan, **recorded} if plan.get(key) != recorded.get(key)]
        if other:
            raise RowError(
                f"'{self.folder}' holds a build with another {', '.join(other)}: {recorded.get(other[0])!r}, "
                f"not {plan.get(other[0])!r}; choose another output, or remove the folder"
            )

    def recorded(self, name: str) -> dict[str, Any]:
        """Read the inputs recorded by `agree`."""
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def remove_unfinished(self) -> None:
        """Remove partial files of a build that was killed."""
        for path in self.folder.glob("*.tmp"):
            path.unlink()


def hash_of_files(piece: Piece) -> str:
    """Hash the local files that a piece's options name, so that a resumed build detects changed files."""
    values = [value for value in piece.options.values() if type(value) is str]
    files = [Path(value) for value in values if Path(value).exists()]
    return of_files(files) if files else ""
