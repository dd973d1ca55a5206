"""Prompts whose media turn out unreadable during a rollout: drop their groups, or raise an error."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.config.loading import ConfigError
from mmrl.core.types import Prompt, PromptError
from mmrl.data.row_prompts import chosen, uids_of
from mmrl.runtime.content_hash import of_prompts
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import write_whole

FILE = "unreadable.json"
log = logging.getLogger("mmrl")


@dataclass
class Unreadable:
    """The prompts of a data set that could not be read; all processes record the same prompts.

    Args:
        drops: Drop unreadable prompts; otherwise the first one is an error.
        place: Configuration key of the data set, for messages.
    """

    drops: bool = False
    place: str = "data"
    found: dict[str, str] = field(default_factory=dict)  # maps the uid of a prompt to the reason
    caught: PromptError | None = None  # error caught by this process

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Catch and store a `PromptError` of this process until all processes call `agree`."""
        try:
            yield
        except PromptError as error:
            self.caught = error

    def agree(self, processes: Processes) -> bool:
        """Share the caught prompt errors; return whether there are any. Every process must call this."""
        mine, self.caught = self.caught, None
        # Rebuild the message: the error of a Ray worker includes a traceback.
        gathered = processes.all_gather_object(
            [mine.uid, str(PromptError(mine.uid, mine.reason))] if mine else []
        )
        new = {uid: reason for uid, reason in filter(None, gathered)}
        for uid, reason in new.items():
            if self.drops and uid not in self.found and processes.main:
                log.warning("dropped %s", reason)
        self.found |= new
        return bool(new)

    def rest(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the given prompts without those known to be unreadable."""
        return [prompt for prompt in prompts if prompt.uid not in self.found]

    def error(self) -> ConfigError:
        """Create the error that lists the unreadable prompts."""
        return ConfigError(
            f"{'; '.join(self.found.values())}. Set `bad_rows: drop` on the data set ({self.place}), or take "
            "the row out: the same command then goes on from the last checkpoint"
        )

    def note(self, folder: Path, data: Sequence[Prompt]) -> None:
        """Write the unreadable prompts and the hash of the remaining data, for a resume without them."""
        left = chosen(data, [at for at, uid in enumerate(uids_of(data)) if uid not in self.found])
        record = {"prompts": self.found, "inputs": of_prompts(left, named=False)}
        write_whole(folder / FILE, json.dumps(record, indent=1, ensure_ascii=False))


def taken_out(folder: Path, data: Sequence[Prompt]) -> Mapping[str, str]:
    """Return the recorded unreadable prompts if exactly these were removed from the data of a run."""
    if not (folder / FILE).is_file():
        return {}
    record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return record["prompts"] if record["inputs"] == of_prompts(data, named=False) else {}
