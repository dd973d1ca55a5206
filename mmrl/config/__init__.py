"""Configuration files: schema, loading, the registry of pieces, and binding names to functions."""

from __future__ import annotations

from typing import Any

from mmrl.config.loading import SHORTHANDS


def _trl(*given: Any, **options: Any) -> dict[str, Any]:
    from mmrl.trl.translation import applied  # imported here, because that module imports this package

    return applied(*given, **options)


SHORTHANDS["trl"] = _trl
