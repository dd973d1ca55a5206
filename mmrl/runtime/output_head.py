"""Logits from the last hidden states of a language model, as its forward pass computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError

# Vision-language model types, such as Granite Vision's, whose forward pass omits the logit scale of the
# language model. They were trained with this scale: vLLM applies it, as transformers 4.51 did.
UNSCALED = ("llava_next", "aya_vision", "cohere2_vision")


class OutputHead:
    """The output head of a language model, with the scale and the soft cap of its logits.

    Cohere multiplies logits by `logit_scale`, Falcon-H1 by `lm_head_multiplier`, HyperCLOVA X by
    `logits_scaling`. Granite and MiniCPM3 divide by `logits_scaling`. Gemma and NanoChat map logits x to c
    tanh(x / c), where c is `final_logit_softcapping`.
    """

    def __init__(self, model: Any) -> None:
        self.linear: nn.Module = model.get_output_embeddings()
        text = model.config.get_text_config(decoder=True)
        scaling = getattr(text, "logits_scaling", None) or 1.0
        self.factor = scaling if text.model_type.startswith("hyperclovax") else 1.0 / scaling
        for name in ("logit_scale", "lm_head_multiplier"):
            self.factor *= getattr(text, name, None) or 1.0
        self.cap = getattr(text, "final_logit_softcapping", None)

    @property
    def weight(self) -> Tensor:
        """The weight (vocabulary, hidden size) of the linear layer."""
        return self.linear.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits (..., vocabulary) from hidden states (..., hidden size)."""
        logits = self.linear(hidden)
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def forward_factor(model: Any) -> float:
    """Return the factor that converts logits of the forward pass to logits of `OutputHead`, mostly 1."""
    return OutputHead(model).factor if model.config.model_type in UNSCALED else 1.0


class _States:
    """Mock output of a model body: only the last hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raise `ConfigError` unless `OutputHead` gives the same logits as the model's forward pass.

    A difference by `forward_factor` is allowed. Only the computation after the last layer runs, on artificial
    hidden states.
    """
    core, head = model.base_model, OutputHead(model)
    weight = head.weight
    if core is model:
        raise ConfigError(
            f"a model of type '{model.config.model_type}' has no part without its head (`base_model` of "
            "transformers), whose hidden states are read here; of the language part of a vision-language "
            "model name the whole model, and in place of others a model of another type"
        )
    if weight.is_meta:
        return
    width = getattr(head.linear, "in_features", weight.shape[1])
    hidden = torch.linspace(-2, 2, 3 * width, device=weight.device).view(1, 3, width)
    hidden = hidden.to(weight.dtype if weight.is_floating_point() else torch.float32)
    core = core if isinstance(core, nn.Module) else core.get_decoder()  # `base_model` may be no module
    before = vars(core).get("forward")
    core.forward = lambda *_, **__: _States(hidden)
    try:
        wanted = model(input_ids=torch.zeros(1, 3, dtype=torch.int64, device=weight.device)).logits
    finally:
        del core.forward
        if before is not None:
            core.forward = before
    own = head(hidden)[..., : wanted.shape[-1]]  # Janus's forward pass has the text head only
    hidden_tokens = wanted <= torch.finfo(wanted.dtype).min / 2  # image tokens, which Chameleon masks
    logits, wanted = (x.masked_fill(hidden_tokens, 0).float() for x in (own, wanted))
    wanted = wanted * forward_factor(model)
    if not (logits - wanted).norm() <= 0.02 * wanted.norm():
        raise ConfigError(
            f"a model of type '{model.config.model_type}' does not take the logits of its head as they are; "
            "`mmrl.runtime.output_head.OutputHead` knows `logit_scale`, `lm_head_multiplier`, "
            "`logits_scaling` and `final_logit_softcapping`, and needs what this model does"
        )
