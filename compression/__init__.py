"""Cheaper models: pruned visual computation, quantised key-value caches, low-bit weights."""

import sys
from pathlib import Path

# Python 3.14 has a standard package of the same name, which gzip and others import. If the working directory
# is the checkout, this folder shadows that package, so append the standard folder to the search path.
__path__ += [
    str(folder)
    for folder in (Path(entry) / "compression" for entry in sys.path)
    if folder.name == "compression" and (folder / "zstd").is_dir()
]
