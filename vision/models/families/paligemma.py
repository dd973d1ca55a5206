"""PaliGemma and PaliGemma 2: one turn of images and text; prompt tokens attend to each other."""

from __future__ import annotations

from torch import Tensor, nn

from mmrl.vision.models.family import Inputs, VLMFamily, linear, patches, per_image, split_images


def from_one(core: nn.Module, inputs: Inputs) -> Tensor:
    return linear(core, inputs) + 1


# Used if the processor has no template; it adds BOS after the images and a line feed after the text.
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] if c['type'] == 'image' %}<image>{% endfor %}"
    "{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
FAMILIES = {
    "paligemma": VLMFamily(
        from_one,
        per_image(patches),
        split_images,
        "token_type_ids",
        prefix_lm=True,
        chat_template=TEMPLATE,
    )
}
