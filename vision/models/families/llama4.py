"""Llama 4: image tiles, and inputs no longer than the first attention chunk."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmrl.vision.models.family import Inputs, VLMFamily, linear, patches, per_image, split_images


class Llama4Core:
    """Llama 4 without its head (transformers has no such class). Other attributes come from `model`.

    Chunked attention sees only tokens of the same chunk of `attention_chunk_size` tokens. Layers without
    rotary positions scale their queries from position `floor_scale` on, but transformers takes the index in
    the padded sequence for the position. Below both limits, all layers attend to all tokens, and all scales
    are 1. So longer inputs are rejected and scaling is switched off, which makes padding and packing safe.

    Args:
        model: A `Llama4ForConditionalGeneration`.
    """

    def __init__(self, model: Any) -> None:
        text = model.config.get_text_config()
        self.model, self.limit = model, min(text.attention_chunk_size or text.floor_scale, text.floor_scale)
        for layer in self.get_decoder().layers:
            layer.self_attn.attn_temperature_tuning = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "model":  # `model` is not set yet during `copy`
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.forward(*args, **options)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, pixel_values: Tensor | None = None, **options: Any
    ) -> Any:
        """Run the language model on token ids (N, S), with T image tiles (T, 3, H, W) at their placeholders.

        Raises ValueError for a position after the first chunk.
        """
        if int(position_ids.max()) >= self.limit - 1:
            raise ValueError(
                f"models of type 'llama4' are read up to {self.limit} tokens, within the first chunk of "
                "their attention; shorten prompts or answers (`max_completion_length`)"
            )
        states = self.model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            features = self.get_image_features(pixel_values).pooler_output.flatten(0, 1).to(states)
            mask = self.model.get_placeholder_mask(input_ids, inputs_embeds=states, image_features=features)
            states = states.masked_scatter(mask, features)
        return self.get_decoder()(inputs_embeds=states, position_ids=position_ids, **options)

    def get_decoder(self) -> Any:
        """Return the text model without its head; `get_decoder` of the model includes the head."""
        return self.model.language_model.model

    def get_image_features(self, pixel_values: Tensor, **options: Any) -> Any:
        """Compute the features of T tiles; `pooler_output` is (T, features per tile, text hidden size)."""
        pixels = in_precision(self, {"pixel_values": pixel_values})
        output = self.model.get_image_features(**{**options, **pixels, "return_dict": True})
        output.pooler_output = self.model.multi_modal_projector(output.last_hidden_state)
        return output


def in_precision(core: Any, media: Inputs) -> dict[str, Tensor]:
    """Convert pixels from the processor's bfloat16 to the dtype of the vision tower."""
    dtype = core.vision_model.patch_embedding.linear.weight.dtype
    return {name: value.to(dtype) if name == "pixel_values" else value for name, value in media.items()}


def _tile(config: Any) -> int:
    """Count the features of an image tile: pixel shuffle merges squares of patches."""
    return round(patches(config) * config.vision_config.pixel_shuffle_ratio**2)


FAMILIES = {
    "llama4": VLMFamily(linear, per_image(_tile), split_images, assemble=in_precision, core=Llama4Core)
}
