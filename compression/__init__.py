"""Cheaper models: pruned visual computation, quantised key-value caches, low-bit weights."""

import sys
from pathlib import Path

# Since Python 3.14 the standard library has a package of this name, which gzip and others import from. With
# the checkout as working directory this folder is found first, so it must lead on to that package.
__path__ += [
    str(folder)
    for folder in (Path(entry) / "compression" for entry in sys.path)
    if folder.name == "compression" and (folder / "zstd").is_dir()
]
