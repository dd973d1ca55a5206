"""A list of prompts that are not kept in memory: a prompt is created from its row on access."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from threading import RLock
from typing import overload
from weakref import WeakValueDictionary

from mmrl.core.types import Prompt
from mmrl.data.fields import RowError
from mmrl.data.row_files import DataRow, Found, RowFile, SourceError, changed

MakePrompt = Callable[[DataRow, int], Prompt | None]


class Places:
    """Row locations, the function that makes a prompt from a row, and a weak cache of live prompts.

    Args:
        make: Maps a row and its number to a prompt; equal arguments must give equal prompts.
    """

    def __init__(self, make: MakePrompt) -> None:
        self.make, self.lock = make, RLock()
        self.files: list[RowFile] = []
        # Per row: index of its file, offset or number in the file, line, and number in the dataset.
        self.rows = array("i"), array("q"), array("i"), array("i")
        self.names, self.ends = bytearray(), array("q")  # all ids concatenated, and the end of each id
        self.kept: dict[int, Prompt] = {}  # prompts of rows that cannot be read again
        self.alive: WeakValueDictionary[int, Prompt] = WeakValueDictionary()

    def add(self, prompt: Prompt, found: Found | None, number: int) -> int:
        """Append a row by its location `found`, or if None by its prompt; return the index of the row."""
        index = len(self.ends)
        if found is None:
            self.kept[index] = prompt
            where = 0, 0, 0
        else:
            if not self.files or self.files[-1] is not found.file:  # rows are added file by file
                self.files.append(found.file)
            where = len(self.files) - 1, found.at, found.line
        for column, value in zip(self.rows, (*where, number), strict=True):
            column.append(value)
        self.names += prompt.uid.encode("utf-8", "surrogatepass")  # an id may be a file name, not in UTF-8
        self.ends.append(len(self.names))
        return index

    def uid(self, index: int) -> str:
        """Return the id of a prompt without reading its row."""
        start = self.ends[index - 1] if index else 0
        return self.names[start : self.ends[index]].decode("utf-8", "surrogatepass")

    def prompt(self, index: int) -> Prompt:
        """Return a prompt from the cache, or create it again; raises `SourceError` if its row has changed."""
        with self.lock:  # two threads must get the same object
            prompt = self.kept.get(index) or self.alive.get(index)
            if prompt is None:
                prompt = self.alive[index] = self._read(index)
            return prompt

    def _read(self, index: int) -> Prompt:
        file, at, line, number = (column[index] for column in self.rows)
        row = self.files[file].row(Found(self.files[file], at, line))
        try:
            if row.fault:
                raise RowError(row.fault)
            prompt = self.make(row, number)
        except RowError as error:
            raise SourceError(f"{changed(row.place)}; now it cannot be used: {error}") from error
        if prompt is None or prompt.uid != self.uid(index):
            raise SourceError(f"{changed(row.place)}; it was the row '{self.uid(index)}'")
        return prompt


class RowPrompts(Sequence[Prompt]):
    """The prompts of a dataset, or some of them, read from the files on access.

    As long as a prompt is referenced anywhere, indexing returns the same object. Slices are lazy, too.
    """

    def __init__(self, places: Places, indices: Sequence[int]) -> None:
        self.places, self.indices = places, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, at: int) -> Prompt: ...
    @overload
    def __getitem__(self, at: slice) -> RowPrompts: ...
    def __getitem__(self, at: int | slice) -> Prompt | RowPrompts:
        if isinstance(at, slice):
            return RowPrompts(self.places, self.indices[at])
        return self.places.prompt(self.indices[at])

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.places.prompt, self.indices)

    def __reduce__(self) -> tuple[type[list], tuple[list[Prompt]]]:
        return list, (list(self),)  # another process may not have the files: pickle the prompts


# ---- functions for any list of prompts, which read as few rows of `RowPrompts` as possible


def uids_of(prompts: Sequence[Prompt]) -> list[str]:
    """List the ids of prompts, without reading their rows."""
    if isinstance(prompts, RowPrompts):
        return [prompts.places.uid(index) for index in prompts.indices]
    return [prompt.uid for prompt in prompts]


def chosen(prompts: Sequence[Prompt], places: Sequence[int]) -> Sequence[Prompt]:
    """Select prompts by their indices, in this order."""
    if isinstance(prompts, RowPrompts):
        return RowPrompts(prompts.places, array("q", (prompts.indices[place] for place in places)))
    return [prompts[place] for place in places]


class ByUid(Mapping[str, Prompt]):
    """Mapping from ids to prompts; the index of ids is built on first use."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Index of each prompt id in the list of prompts."""
        return {uid: place for place, uid in enumerate(uids_of(self.prompts))}

    def __getitem__(self, uid: str) -> Prompt:
        return self.prompts[self.place[uid]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.place)

    def __len__(self) -> int:
        return len(self.place)
