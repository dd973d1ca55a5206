"""Encoded media that rows contain, kept in a file on disk instead of memory.

A parquet file of images would otherwise be in the memory of every process of a machine. Equal bytes are kept
once: a row that is read again brings the same image.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

IN_MEMORY = 64 << 20  # bytes of a process that stay in memory; what comes after goes to the file


@dataclass(frozen=True, eq=False)
class StoredBytes:
    """Bytes that are read from a temporary file of this process when they are asked for."""

    file: ByteFile
    start: int
    length: int

    def read(self) -> bytes:
        """Read them."""
        return os.pread(self.file.descriptor, self.length, self.start)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return BytesInMemory, (self.read(),)  # another process, perhaps of another machine, has no such file


@dataclass(frozen=True, eq=False)
class BytesInMemory:
    """Bytes of the same form that are in memory."""

    data: bytes

    def read(self) -> bytes:
        """Return them."""
        return self.data


@dataclass
class ByteFile:
    """A file without a name, in the folder for temporary files (`TMPDIR`), which goes with the process."""

    limit: int = IN_MEMORY
    in_memory: int = 0
    end: int = 0  # of the file
    known: dict[bytes, StoredBytes | BytesInMemory] = field(default_factory=dict, repr=False)  # by their hash
    file: Any = field(default_factory=tempfile.TemporaryFile, repr=False)
    lock: Any = field(default_factory=Lock, repr=False)

    @property
    def descriptor(self) -> int:
        """What the operating system calls it."""
        return self.file.fileno()

    def put(self, data: bytes) -> StoredBytes | BytesInMemory:
        """Keep bytes: the first ones in memory, and what would exceed the limit in the file."""
        key = hashlib.sha256(data).digest()
        with self.lock:
            if key not in self.known:
                self.known[key] = self._put(data)
            return self.known[key]

    def _put(self, data: bytes) -> StoredBytes | BytesInMemory:
        if self.in_memory + len(data) <= self.limit:
            self.in_memory += len(data)
            return BytesInMemory(data)
        start, self.end = self.end, self.end + len(data)
        self.file.seek(start)
        self.file.write(data)
        self.file.flush()
        return StoredBytes(self, start, len(data))


@cache
def byte_file() -> ByteFile:
    """Return the file of this process."""
    return ByteFile()
