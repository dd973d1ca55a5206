"""mmrl: one toolkit to train vision-language and flow-matching models with GRPO-family objectives, and to run
them cheaper."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.2.0.dev0"

# `mmrl/vision` is a symbolic link to `../vision`, and so on. If links were not checked out
# (Windows, some archives), the folders beside this package are searched as well.
if not (Path(__file__).parent / "vision" / "__init__.py").is_file():
    __path__.append(str(Path(__file__).parents[1]))


def __getattr__(name: str):
    """Import a public name when it is first used, because importing torch takes seconds."""
    from importlib import import_module

    homes = {
        "Trainer": "mmrl.api.trainer",
        "GRPOTrainer": "mmrl.api.trainer",
        "DPOTrainer": "mmrl.api.trainer",
        "SFTTrainer": "mmrl.api.trainer",
        "load": "mmrl.config.schema",
        "load_engine": "mmrl.build",
        "load_pruned": "mmrl.inference.saving",
    }
    if name not in homes:
        raise AttributeError(f"module 'mmrl' has no attribute '{name}'")
    return getattr(import_module(homes[name]), name)
