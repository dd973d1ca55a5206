"""The model family of FLUX.1 Kontext (arXiv 2506.15742)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from mmrl.config.registry import family
from mmrl.diffusion.encoded_prompts import digest
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_families.flux import Flux
from mmrl.diffusion.model_family import PackedFamily, Request


@family
class FluxKontext(Flux):
    """FLUX.1 Kontext: FLUX.1 with the latents of one image as a condition, or with text alone.

    As in the pipeline, the image is resized to about 1024 x 1024 pixels, in the closest aspect ratio that the
    model was trained on. The result has the engine's size; the pipeline would scale it to the area
    `max_area`. Guidance is only an input of the network: the pipeline's `true_cfg_scale` stays 1.
    """

    pipelines = frozenset({"FluxKontextPipeline"})
    images = (0, 1)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts as FLUX.1 does, and images to latents (C, h, w)."""
        conditions = super().encode(pipe, requests, max_sequence_length)
        for request, condition in zip(requests, conditions, strict=True):
            self.check_count(len(request.images))
            for image in request.images:
                self.check_source(pipe, *image.shape[-2:])
                condition |= self.once(partial(self._see, pipe, image), digest(image))
        return conditions

    def _see(self, pipe: Any, image: Tensor) -> dict[str, Tensor]:
        """Encode an image to latents (C, h, w)."""
        return {"image_0": self.image_latents(pipe, resized(pipe, image))}

    def check_source(self, pipe: Any, height: int, width: int) -> None:
        """Raise ValueError if a source image is smaller than one token."""
        multiple = 2 * pipe.vae_scale_factor
        if min(height, width) < multiple:
            raise ValueError(
                f"an image of {height} x {width} pixels is smaller than one token of {multiple} x {multiple}"
                "; give a larger image"
            )

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly, whatever the scheduler's settings, and shift them for the result's size."""
        return PackedFamily.sigmas(self, pipe, num_steps, shape)


def resized(pipe: Any, image: Tensor) -> Any:
    """Resize an image (3, height, width) to the closest aspect ratio that the pipeline prefers."""
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    original, multiple = to_pil(image), 2 * pipe.vae_scale_factor
    height, width = pipe.image_processor.get_default_height_width(original)  # multiples of a token's side
    # Of equally close ratios take the first, which is the smallest, as the pipeline does.
    _, width, height = min((abs(width / height - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
    return pipe.image_processor.resize(original, height // multiple * multiple, width // multiple * multiple)
