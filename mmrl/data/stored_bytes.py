"""Storage of the encoded media of rows in a temporary file instead of memory.

So images of a parquet file do not fill the memory of every process. Equal bytes are stored only once, because
the same rows are read several times.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

IN_MEMORY = 64 << 20  # most bytes per process in memory; further bytes go to the file


@dataclass(frozen=True, eq=False)
class StoredBytes:
    """Bytes in the temporary file of this process."""

    file: ByteFile
    start: int
    length: int

    def read(self) -> bytes:
        """Read the bytes from the file."""
        return os.pread(self.file.descriptor, self.length, self.start)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return BytesInMemory, (self.read(),)  # another process does not have the file


@dataclass(frozen=True, eq=False)
class BytesInMemory:
    """Bytes in memory, with the interface of `StoredBytes`."""

    data: bytes

    def read(self) -> bytes:
        """Return the bytes."""
        return self.data


@dataclass
class ByteFile:
    """An unnamed file in the folder for temporary files (`TMPDIR`); it is deleted with the process."""

    limit: int = IN_MEMORY
    in_memory: int = 0
    end: int = 0  # size of the file
    stored: dict[bytes, StoredBytes | BytesInMemory] = field(default_factory=dict, repr=False)  # by SHA-256
    file: Any = field(default_factory=tempfile.TemporaryFile, repr=False)
    lock: Any = field(default_factory=Lock, repr=False)

    @property
    def descriptor(self) -> int:
        """The file descriptor."""
        return self.file.fileno()

    def put(self, data: bytes) -> StoredBytes | BytesInMemory:
        """Store bytes in memory up to `limit`, then in the file; return an object to read them from."""
        key = hashlib.sha256(data).digest()
        with self.lock:
            if key not in self.stored:
                self.stored[key] = self._put(data)
            return self.stored[key]

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
    """Return the `ByteFile` of this process, which is created at the first call."""
    return ByteFile()
