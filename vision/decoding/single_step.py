"""Fast decode step of one token per row with few operators, for text models built like Llama.

With few rows, a step spends its time on calls of operators and modules rather than on arithmetic.
`SingleStep` uses the weights of the layers without calling their modules. It fuses the query, key and value
projections, and the gate and up projections, adds residuals inside matrix products, and computes rotary
angles for many steps at once. Results equal those of the modules up to rounding. As in the modules, autocast
sets the precision of matrix products only; everything else has the precision of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.onednn import MANY, PLAIN, Packed, is_plain, is_replaced, side_by_side

# Families whose layers compute x + attention(norm(x)), then x + down(act(gate(y)) * up(y)) with y = norm(x),
# and whose rotary embeddings rotate the two halves of a head.
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VLText",
}
LAYERS = {
    f"transformers.models.{family}.modeling_{family}.{name}DecoderLayer" for family, name in FAMILIES.items()
}
WITHIN = ("language_model", "text_model")  # attribute names of the text model in a vision-language model
LENGTH_DEPENDENT = ("dynamic", "longrope")  # types of rotary embeddings that depend on the longest position
AHEAD = 32  # number of steps whose rotary angles are computed at once
Angles = tuple[Tensor, Tensor]  # cosines and signed sines (N, 1, 1, D) for N rows and D channels per head
_STEP: ContextVar[SingleStep | None] = ContextVar("single_step", default=None)


@contextmanager
def single_steps(core: nn.Module, packed: Mapping[int, Packed]) -> Iterator[None]:
    """Inside the context, decode single tokens with the faster `SingleStep` if the model supports it.

    `Prefix.read` uses it. `packed` maps `id(layer)` to weights packed by `onednn`. Weights must not change.
    """
    text = find_decoder(core)
    token = _STEP.set(None if text is None else SingleStep(core, text, packed))
    try:
        yield
    finally:
        _STEP.reset(token)


def step_of(core: nn.Module) -> SingleStep | None:
    """Return a model's `SingleStep`; None outside `single_steps`, with gradients, or in another autocast."""
    step = _STEP.get()
    if step is None or step.core is not core or torch.is_grad_enabled():
        return None
    return step if step.compute == autocast_dtype(step.embed.weight.device) else None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast; None without autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def find_decoder(core: nn.Module) -> nn.Module | None:
    """Find the text model in a model without its head; return None if `SingleStep` does not support it.

    Models with hooks, derived classes or replaced `forward` methods are not supported.
    """
    text = next((x for name in WITHIN if (x := getattr(core, name, None)) is not None), core)
    layers = getattr(text, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers) or {*map(_path, layers)} - LAYERS:
        return None
    name = type(layers[0]).__name__.removesuffix("DecoderLayer")
    if type(text).__name__ not in (f"{name}Model", f"{name}TextModel"):
        return None
    if any(map(_is_changed, (core, *text.modules()))) or type(text.embed_tokens) is not nn.Embedding:
        return None
    if not _path(core).startswith("transformers."):
        return None  # unknown classes may compute something else
    plain = all(
        type(layer.self_attn).__name__ == f"{name}Attention"
        and {type(layer.input_layernorm).__name__, type(layer.post_attention_layernorm).__name__}
        == {f"{name}RMSNorm"}
        for layer in layers
    )
    dtypes = torch.float32, autocast_dtype(text.embed_tokens.weight.device)
    supported = plain and all(p.dtype in dtypes for p in text.parameters())
    return text if supported and text.rotary_emb.rope_type not in LENGTH_DEPENDENT else None


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_changed(module: nn.Module) -> bool:
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    return hooked or "forward" in vars(module) and not is_replaced(module)


class SingleStep:
    """Runs one token per row through the weights of a text model, without its modules.

    Args:
        core: The model without its head.
        text: The text model inside `core`, from `find_decoder`.
        packed: Maps `id(layer)` to weights packed by `onednn`.
    """

    def __init__(self, core: nn.Module, text: Any, packed: Mapping[int, Packed]) -> None:
        self.core, self.embed, self.rotary = core, text.embed_tokens, text.rotary_emb
        self.compute, self._text, self._packed = autocast_dtype(self.embed.weight.device), text, packed
        self.norm = _Norm([text.norm.weight], text.norm.variance_epsilon)

    @cached_property
    def layers(self) -> list[_Layer]:
        """Weights of the layers, converted to the precision of autocast in the first step."""
        torch.clear_autocast_cache()  # free the prefill's copies of the same weights
        layers = self._text.layers[: self._text.config.num_hidden_layers]
        return [_Layer(layer, self._packed, self.compute) for layer in layers]

    def __call__(self, ids: Tensor, angles: Angles, layers: Sequence[Any]) -> Tensor:
        """Run one token per row (N,) with the layers of a KV cache; return hidden states (N, width)."""
        states = self.embed(ids)
        for layer, cache in zip(self.layers, layers, strict=True):
            states = layer(states, angles, cache)
        return self.norm(states)

    def angles(self, positions: Tensor) -> list[Angles]:
        """Compute the rotary angles of each of t steps from positions (N, t), or (A, N, t) on A axes."""
        cos, sin = self.rotary(self.embed.weight, positions)  # (N, t, D) each
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # signs for the rotation by `roll`
        cos, sin = (x.transpose(0, 1)[:, :, None, None].contiguous().unbind() for x in (cos, sin))
        return list(zip(cos, sin, strict=True))


class _Layer:
    """One decoder layer: attention and MLP with their norms and residual sums."""

    def __init__(self, layer: Any, packed: Mapping[int, Packed], compute: torch.dtype | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.size, self.scaling, self.activation = attention.head_dim, attention.scaling, mlp.act_fn
        inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.queries, self.keys = (x.out_features // self.size for x in inputs[:2])  # numbers of heads
        self.inputs, self.output, self.widened, self.narrowed = (
            _Product(product, packed, compute)
            for product in (inputs, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj])
        )
        self.before, self.between = (
            _Norm([norm.weight], norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.of_heads = None
        if hasattr(attention, "q_norm"):
            weights = [attention.q_norm.weight] * self.queries + [attention.k_norm.weight] * self.keys
            self.of_heads = _Norm(weights, attention.q_norm.variance_epsilon)

    def __call__(self, states: Tensor, angles: Angles, cache: Any) -> Tensor:
        rows, heads = len(states), self.inputs(self.before(states))
        turned, values = heads.view(rows, -1, 1, self.size).split([self.queries + self.keys, self.keys], 1)
        turned = turned if self.of_heads is None else self.of_heads(turned)
        # Rotary embedding rotates channels i and i + size / 2 together; rolling swaps the halves of a head.
        turned = torch.addcmul(turned * angles[0], turned.roll(self.size // 2, -1), angles[1])
        queries, keys = turned.to(values.dtype).split([self.queries, self.keys], 1)
        cache.update(keys, values)
        attended = cache.attend(queries, None, self.scaling)
        states = self.output.plus(attended.reshape(rows, -1), states)
        gate, up = self.widened(self.between(states)).chunk(2, -1)
        return self.narrowed.plus(self.activation(gate) * up, states)


class _Norm:
    """RMSNorm x / sqrt(mean(x^2) + eps) * weight for x (N, w), or (N, H, 1, w) with H weights."""

    def __init__(self, weights: Sequence[Tensor], eps: float) -> None:
        weight = torch.stack([weight.detach() for weight in weights])
        width = weight.shape[-1]
        self.whole, self.eps = (weight[:, None] if len(weights) > 1 else weight[0]), eps
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(width eps)) / sqrt(width)
        self.weight = self.whole * math.sqrt(width)
        self.least = weight.new_tensor(math.sqrt(width * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda or x.dtype != torch.float32:  # the fused kernel computes in float32 inside
            if x.dtype == self.whole.dtype and self.whole.dim() == 1:
                return nn.functional.rms_norm(x, x.shape[-1:], self.whole, self.eps)
            return nn.functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps) * self.whole
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self.weight).div_(torch.hypot(norm, self.least))


class _Product:
    """Linear layers with the same input, computed as one product with concatenated outputs.

    Small weights, which `onednn` does not pack, are copied into one tensor. So are float32 weights under
    autocast, because autocast would copy them anyway.
    """

    def __init__(
        self, layers: Sequence[nn.Module], packed: Mapping[int, Packed], compute: torch.dtype | None
    ) -> None:
        self.layers, self.compute = layers, compute
        self.weight: Tensor | None = None  # (n inputs, m outputs)
        self.bias: Tensor | None = None
        first = packed.get(id(layers[0]))
        self.packed = first if first is not None and [*first.layers] == [*layers] else None
        if compute is not None:
            copied = all(_is_float32(layer) for layer in layers)
        else:
            plain = [layer for layer in layers if self.packed is None and is_plain(layer)]
            copied = len(plain) == len(layers) and sum(layer.weight.numel() for layer in plain) <= MANY
        if copied:
            weight, self.bias = side_by_side(layers, compute or torch.float32)
            self.weight = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """Map inputs (N, n) to the concatenated outputs (N, m) of all layers."""
        if self.weight is not None:
            x = x if self.compute is None else x.to(self.compute)
            return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        if self.packed is not None and self.packed.suits(x):
            return self.packed.multiply(x)
        outputs = [layer(x) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Map inputs (N, n) to the concatenated outputs of all layers, and add `other` (N, m)."""
        if self.weight is not None and self.bias is None and self.compute is None:
            return torch.addmm(other, x, self.weight)
        if self.packed is not None and self.packed.suits(x):
            return self.packed.multiply(x, other)
        return self(x) + other


def _is_float32(layer: nn.Module) -> bool:
    weight = layer.weight if type(layer) is nn.Linear and "forward" not in vars(layer) else None
    return type(weight) in PLAIN and weight.dtype == torch.float32
