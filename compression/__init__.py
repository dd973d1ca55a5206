"""Cheaper models: pruned visual computation, quantised key-value caches, low-bit weights."""

import sys
from pathlib import Path

# Python 3.14 has a standard package of the same name, which gzip and others import. With the checkout as
# working directory this folder shadows it, so the standard folder is appended to the search path.
__path__ += [
    str(folder)
    for folder in (Path(entry) / "compression" for entry in sys.path)
    if folder.name == "compression" and (folder / "zstd").is_dir()
]
