"""The model family of FLUX.2 klein (https://github.com/black-forest-labs/flux2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmrl.config.registry import family
from mmrl.diffusion.model_families.flux2 import Flux2
from mmrl.diffusion.model_family import check_fits


@family
class Flux2Klein(Flux2):
    """FLUX.2 klein: Qwen3 reads the text as a user's turn, without thinking; guidance is classifier-free.

    Images are conditions as in FLUX.2, and also accompany the negative prompt, which is always the empty text
    in the pipeline. Models distilled to few steps (`is_distilled`) ignore the guidance scale.
    """

    pipelines = frozenset({"Flux2KleinPipeline"})
    embedded_guidance = False

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if a text, with its chat template, is too long."""
        turn = [{"role": "user", "content": text}]
        rendered = pipe.tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        check_fits(pipe.tokenizer, rendered, max_sequence_length)

    def single_pass(self, pipe: Any) -> bool:
        """Return whether the model is distilled to few steps, and so needs no guidance."""
        return pipe.config.is_distilled

    def _scale(self, guidance: Tensor) -> None:
        """Return None, because the network has no input for the guidance scale."""
        return None
