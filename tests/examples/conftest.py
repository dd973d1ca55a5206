"""What tests of examples and benchmarks share: no curves of their runs, and few samples for intervals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.quick import FEW


@pytest.fixture(autouse=True, scope="package")
def no_curves_of_runs() -> Iterator[None]:
    """Draw nothing on the pages of runs: it takes longer than their steps. Reports of demos have curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.reporting.html.pages.curves", lambda runs: [])
        patch.setattr("mmrl.reporting.html.pages.time_split", lambda records: "")
        yield


@pytest.fixture(autouse=True, scope="package")
def few_resamples_of_claims() -> Iterator[None]:
    """Draw few bootstrap samples for the tables of benchmarks, as `few_resamples` does for evaluations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.samplers.RESAMPLES", FEW)
        yield
