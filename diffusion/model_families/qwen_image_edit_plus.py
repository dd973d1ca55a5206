"""The model family of Qwen-Image-Edit-Plus: the checkpoints 2509 and later of Qwen-Image-Edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmrl.config.registry import family
from mmrl.diffusion.model_families.qwen_image_edit import AREA, QwenImageEdit, resized

READ_AREA = 384 * 384  # pixels of an image for the language model


@family
class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus: edits one image or combines several, shown before the text as "Picture 1" etc.

    As in the pipeline, an image is resized to about 384 x 384 pixels for the language model and to about
    1024 x 1024 for the network, in its own aspect ratio, in multiples of 32, whatever the size of the
    result. The pipeline does not limit the number of images. Ten images leave room for a text of 1024 tokens
    among the 4096 positions that the network has for texts.
    """

    pipelines = frozenset({"QwenImageEditPlusPipeline"})
    images = (1, 10)

    def resize(self, pipe: Any, images: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        """Resize every image twice: for the language model, and for the autoencoder."""
        read, seen = ([resized(pipe, image, area) for image in images] for area in (READ_AREA, AREA))
        return read, seen
