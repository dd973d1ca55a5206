"""Human Preference Score v2.1 (arXiv 2306.09341)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import as_pil, device_of, find_weights, once, picture_of, shared, warn_of_cuts


@reward(packages={"open_clip": "clip"})
class Hpsv2:
    """Predict which picture people prefer for its prompt: the cosine of text and picture in a ViT-H-14 of
    open_clip that was tuned to rankings (arXiv 2306.09341), about 0.2 to 0.35.

    `weights` is `HPS_v2.1_compressed.pt`, a file or `owner/name:file` of the hub. Of a clip the first frame
    counts.
    """

    def __init__(
        self,
        *,
        weights: str = "xswu/HPSv2:HPS_v2.1_compressed.pt",
        model: str = "ViT-H-14",
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        try:
            import open_clip
        except ImportError as error:
            raise ImportError("hpsv2 needs open_clip: pip install 'mmrl[clip]'") from error
        self.device, self.batch_size = device_of(device), batch_size
        self.model = shared(("hpsv2", weights, model, str(self.device)), lambda: self._load(model, weights))
        settings = open_clip.transform.PreprocessCfg(**self.model.visual.preprocess_cfg)
        self.prepare = open_clip.transform.image_transform_v2(settings, is_train=False)
        self.tokenizer = open_clip.get_tokenizer(model)

    def _load(self, model: str, weights: str) -> nn.Module:
        import open_clip

        path = find_weights("hpsv2", weights)
        try:
            made = open_clip.create_model(
                model, pretrained=str(path), precision="fp32", require_pretrained=True, weights_only=True
            )
        except Exception as error:  # open_clip, torch and pickle raise what they like
            raise ValueError(
                f"hpsv2: '{path}' does not hold the weights of '{model}' as named tensors, plain or as "
                f"`state_dict`: {' '.join(str(error).split())[:300]}"
            ) from error
        return made.eval().requires_grad_(False).to(self.device)

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        texts = [prompt.text for prompt in prompts]
        tokens = lambda text: len(self.tokenizer.encode(text)) + 2
        warn_of_cuts("hpsv2", texts, tokens, self.tokenizer.context_length)
        pictures = [picture_of(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        looks = once(self._look, pictures, self.batch_size)
        reads = once(self._read, texts, self.batch_size)
        return [float(look @ read) for look, read in zip(looks, reads, strict=True)]

    def _look(self, pictures: Sequence[Tensor]) -> Tensor:
        pixels = torch.stack([self.prepare(as_pil(picture)) for picture in pictures]).to(self.device)
        return normalize(self.model.encode_image(pixels), dim=-1).cpu()

    def _read(self, texts: Sequence[str]) -> Tensor:
        return normalize(self.model.encode_text(self.tokenizer(list(texts)).to(self.device)), dim=-1).cpu()
