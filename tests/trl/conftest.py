"""The tiny checkpoints of vision-language models and pipelines."""

from tests.diffusion.conftest import checkpoint as pipelines
from tests.vision.conftest import checkpoint

__all__ = ["checkpoint", "pipelines"]
