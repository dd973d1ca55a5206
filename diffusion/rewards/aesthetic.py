"""The aesthetic predictor of LAION: linear layers on what CLIP sees."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import normalize

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import (
    LinearHead,
    as_pil,
    device_of,
    fill,
    find_weights,
    load_pretrained,
    once,
    picture_of,
    read_weights,
    shared,
)


@reward
class Aesthetic:
    """Predict how people rate a picture by its looks, about 1 to 10; the prompt does not matter.

    The predictor `sac+logos+ava1-l14-linearMSE`: the embedding of a picture by CLIP ViT-L/14, at length 1,
    through linear layers. `model` is a folder or a model of the hub, `weights` a file or `owner/name:file`.
    Of a clip the first frame counts.
    """

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-large-patch14",
        weights: str = "trl-lib/ddpo-aesthetic-predictor:aesthetic-model.pth",
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

        self.device, self.batch_size = device_of(device), batch_size
        load = lambda: load_pretrained("aesthetic", CLIPVisionModelWithProjection, model).to(self.device)
        self.model = shared(("aesthetic", model, str(self.device)), load)
        self.processor = CLIPImageProcessor.from_pretrained(model)
        self.head = LinearHead(self.model.config.projection_dim)
        fill("aesthetic", self.head, read_weights("aesthetic", find_weights("aesthetic", weights)))
        self.head.eval().requires_grad_(False).to(self.device)

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        pictures = [picture_of(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        return [float(row) for row in once(self._rate, pictures, self.batch_size)]

    def _rate(self, pictures: Sequence[Tensor]) -> Tensor:
        given = self.processor(images=[as_pil(picture) for picture in pictures], return_tensors="pt")
        embedding = self.model(pixel_values=given["pixel_values"].to(self.device)).image_embeds
        return self.head(normalize(embedding, dim=-1)).cpu()
