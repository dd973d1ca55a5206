"""What makes models cheaper to run: pruned visual computation, and visual keys and values in few bits."""

import sys
from pathlib import Path

# Since Python 3.14 the standard library has a package of this name, which gzip and others import from. A
# shell that
# stands in the checkout finds this folder first, so it must lead on to that one.
__path__ += [
    str(folder)
    for folder in (Path(entry) / "compression" for entry in sys.path)
    if folder.name == "compression" and (folder / "zstd").is_dir()
]
