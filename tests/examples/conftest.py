"""What tests of examples and benchmarks share: few samples for intervals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.quick import FEW


@pytest.fixture(autouse=True, scope="package")
def few_resamples_of_claims() -> Iterator[None]:
    """Draw few bootstrap samples for the tables of benchmarks, as `draw_few` does for evaluations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.samplers.RESAMPLES", FEW)
        yield
