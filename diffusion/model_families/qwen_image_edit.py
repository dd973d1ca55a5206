"""The model family of Qwen-Image-Edit (arXiv 2508.02324)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from mmrl.config.registry import family
from mmrl.diffusion.encoded_prompts import digest
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_families.qwen_image import QwenImage
from mmrl.diffusion.model_family import Condition, Request, per_text

AREA = 1024 * 1024  # pixels to which the pipeline resizes an image


@family
class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: a vision-language model reads image and text; the network also sees image latents.

    As in the pipeline, the image is resized to about 1024 x 1024 pixels in its own aspect ratio, with sides
    in multiples of 32, whatever the size of the result. Its tokens do not count towards the text length. The
    images of a batch can differ in size; rows with images of one size run through the network together.
    """

    pipelines = frozenset({"QwenImageEditPipeline"})
    images = (1, 1)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode text and images: hidden states (tokens, D), and latents (C, h, w) of every image."""
        conditions = []
        for request in requests:
            self.check_text(pipe, request.text, max_sequence_length)
            self.check_count(len(request.images))
            images = tuple(map(digest, request.images))  # no size in the key: all result sizes share these
            seen = self.once(partial(self._see, pipe, request.images), images)
            read = self.once(partial(self._read, pipe, request.text, request.images), request.text, images)
            conditions.append(read | seen)
        return conditions

    def _read(self, pipe: Any, text: str, images: Sequence[Tensor]) -> Condition:
        """Encode a text and its images with the vision-language model."""
        states, _ = pipe.encode_prompt([text], image=self.resize(pipe, images)[0])
        return per_text(encoder_hidden_states=states)[0]

    def _see(self, pipe: Any, images: Sequence[Tensor]) -> Condition:
        """Encode images to latents (C, h, w) with the autoencoder."""
        seen = self.resize(pipe, images)[1]
        return {f"image_{i}": self.image_latents(pipe, image) for i, image in enumerate(seen)}

    def source_size(self, pipe: Any, height: int, width: int, area: int) -> tuple[int, int]:
        """Compute the pipeline's default size of a result, in multiples of 32."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

        new_width, new_height, _ = calculate_dimensions(area, width / height)
        return int(new_height), int(new_width)

    def resize(self, pipe: Any, images: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        """Resize images; returns Pillow images for the language model, and a list for the autoencoder."""
        image = resized(pipe, images[0], AREA)
        return image, [image]


def resized(pipe: Any, image: Tensor, area: int) -> Any:
    """Resize an image (3, height, width) as the pipelines do: a Pillow image of about `area` pixels."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    height, width = image.shape[-2:]
    new_width, new_height, _ = calculate_dimensions(area, width / height)
    return pipe.image_processor.resize(to_pil(image), new_height, new_width)
