"""PickScore (arXiv 2305.01569)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from torch.nn.functional import normalize

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import (
    as_pil,
    device_of,
    load_pretrained,
    once,
    picture_of,
    shared,
    warn_of_cuts,
)


@reward
class PickScore:
    """Predict which picture people prefer for its prompt: exp(logit_scale) cos(text, picture) of a CLIP
    model that was tuned to choices (arXiv 2305.01569).

    `logit` is about 20 to 24 for current models and is what reports state; Flow-GRPO trains on it with
    `divide_by` 26, DanceGRPO on the `cosine`. Of a clip the first frame counts. `model` and `processor` are
    folders or models of the hub.
    """

    def __init__(
        self,
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        scale: Literal["logit", "cosine"] = "logit",
        divide_by: float = 1.0,
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        from transformers import CLIPModel, CLIPProcessor

        self.device = device_of(device)
        load = lambda: load_pretrained("pick_score", CLIPModel, model).to(self.device)
        self.model = shared(("pick_score", model, str(self.device)), load)
        try:
            self.processor = CLIPProcessor.from_pretrained(processor)
        except (OSError, ValueError) as error:
            raise ValueError(f"pick_score: cannot load the processor '{processor}': {error}") from error
        self.factor = (float(self.model.logit_scale.exp()) if scale == "logit" else 1.0) / divide_by
        self.length = self.model.config.text_config.max_position_embeddings
        self.batch_size = batch_size

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        texts = [prompt.text for prompt in prompts]
        tokens = lambda text: len(self.processor.tokenizer(text, verbose=False).input_ids)
        warn_of_cuts("pick_score", texts, tokens, self.length)
        pictures = [picture_of(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        looks = once(self._look, pictures, self.batch_size)
        reads = once(self._read, texts, self.batch_size)
        return [self.factor * float(look @ read) for look, read in zip(looks, reads, strict=True)]

    def _look(self, pictures: Sequence[Tensor]) -> Tensor:
        given = self.processor(images=[as_pil(picture) for picture in pictures], return_tensors="pt")
        pooled = self.model.vision_model(pixel_values=given["pixel_values"].to(self.device)).pooler_output
        return normalize(self.model.visual_projection(pooled), dim=-1).cpu()

    def _read(self, texts: Sequence[str]) -> Tensor:
        given = self.processor(
            text=list(texts),
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        ).to(self.device)
        pooled = self.model.text_model(
            given["input_ids"], attention_mask=given["attention_mask"]
        ).pooler_output
        return normalize(self.model.text_projection(pooled), dim=-1).cpu()
