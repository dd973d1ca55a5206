"""What tests of examples and benchmarks share: the pages of their runs have no curves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def no_curves_of_runs() -> Iterator[None]:
    """Draw nothing on the page of each run, which takes longer than its steps; reports of demos have curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.reporting.html.pages.curves", lambda runs: [])
        patch.setattr("mmrl.reporting.html.pages.time_split", lambda records: "")
        yield
