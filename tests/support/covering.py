"""The covering of model families that `make test` takes: every family once per file, not with every option.

Files test many properties on many families of models, some with several options. `make test-all` takes the
whole product. `make test` takes all options of one family, and of every other family one item of the file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

MAIN = ("qwen2_5_vl", "StableDiffusion3Pipeline", "sd3")  # the first of them that a test has, else its first
FEW = 3  # families of a test that are all taken


def left_out(tests: Iterable[tuple[str, str, str, Any]]) -> set[Any]:
    """Return the items that a covering leaves out.

    Args:
        tests: Of every item its file, the name of its function, its family, and the item itself.
    """
    files: dict[str, dict[str, dict[str, list[Any]]]] = defaultdict(dict)
    for file, function, family, item in tests:
        files[file].setdefault(function, {}).setdefault(family, []).append(item)
    out = set()
    for functions in files.values():
        large = {name: by for name, by in functions.items() if len(by) > FEW}
        taken = Counter(family for name, by in functions.items() if name not in large for family in by)
        wanted = dict.fromkeys(family for by in large.values() for family in by)
        for number, by in enumerate(large.values()):
            main = next((family for family in MAIN if family in by), next(iter(by)))
            taken[main] += 1
            others = sorted((family for family in by if family != main), key=lambda one: taken[one])
            # As many as are needed so that the functions that follow can take the rest.
            missing = sum(not taken[family] for family in wanted)
            num = max(1, -(-missing // (len(large) - number)))
            for place, family in enumerate(others):
                keep = 1 if place < num else 0
                at = number % len(by[family])
                taken[family] += keep
                out |= {item for i, item in enumerate(by[family]) if not keep or i != at}
    return out
