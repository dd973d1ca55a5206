"""mmrl: one toolkit to train vision-language and flow-matching models with GRPO-family objectives, and to run
them cheaper."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.2.0.dev0"

# `mmrl/vision` is a link to `../vision`, and so on. Where links were not checked out (Windows, some
# archives), the folders beside this one are searched as well.
if not (Path(__file__).parent / "vision" / "__init__.py").is_file():
    __path__.append(str(Path(__file__).parents[1]))


def load_engine(source, overrides=(), *, setting=""):
    """Build the engine of a configuration for inference, with its cache and transforms; `source` is a file
    or a configuration: `mmrl.load_engine("run.yaml").rollout(prompts)`."""
    from mmrl.build import load_engine as load

    return load(source, overrides, setting=setting)
