"""The model family of Qwen-Image-Edit (arXiv 2508.02324)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmrl.config.registry import family
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_families.qwen_image import QwenImage
from mmrl.diffusion.model_family import Request, per_text

AREA = 1024 * 1024  # pixels of an image as the pipeline resizes it


@family
class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: a vision-language model reads image and text; the network also sees image latents.

    As in the pipeline, the image is resized to about 1024 x 1024 pixels of its aspect ratio, in multiples of
    32, whatever the size of the result; its tokens do not count for the length of the text. Images of one
    batch may have different sizes: those of one size go through the network together.
    """

    pipelines = frozenset({"QwenImageEditPipeline"})
    images = (1, 1)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode text and images: states (S, D), and latents (C, h, w) of every image."""
        conditions = []
        for request in requests:
            self.check_text(pipe, request.text, max_sequence_length)
            self.check_count(len(request.images))
            read, seen = self.resize(pipe, request.images)
            states, _ = pipe.encode_prompt([request.text], image=read)
            latents = {f"image_{i}": self.image_latents(pipe, image) for i, image in enumerate(seen)}
            conditions += [{**condition, **latents} for condition in per_text(encoder_hidden_states=states)]
        return conditions

    def resize(self, pipe: Any, images: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        """Resize images to Pillow images: what the language model reads, and what the autoencoder encodes."""
        image = resized(pipe, images[0], AREA)
        return image, [image]


def resized(pipe: Any, image: Tensor, area: int) -> Any:
    """Resize an image (3, height, width) as the pipelines do: a Pillow image of about `area` pixels."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    height, width = image.shape[-2:]
    new_width, new_height, _ = calculate_dimensions(area, width / height)
    return pipe.image_processor.resize(to_pil(image), new_height, new_width)
