"""The table `FAMILIES`, which maps `model_type` to the rules of a vision-language model family.

The rules of a family are in a file of `vision/models/families/`. A model that is not listed gets
positions 0, 1, 2, ..., and only its own forward pass checks the number of features. `check_family` rejects
models that need other rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.core.modalities import MODALITIES
from mmrl.kv_cache.hf_cache import attention_types
from mmrl.kv_cache.layout import placeholders
from mmrl.vision.models import families
from mmrl.vision.models.family import VLMFamily, linear

FAMILIES: dict[str, VLMFamily] = {
    model_type: family
    for module in iter_modules(families.__path__, f"{families.__name__}.")
    for model_type, family in import_module(module.name).FAMILIES.items()
}

CONTINUED = ("qwen3_5", "qwen3_next")  # prefixes of model types whose recurrent state can be continued
KNOWN_LAYERS = ("full_attention", "sliding_attention")  # layer types that models outside `FAMILIES` may have
# Arguments of forward passes that contain token types.
TYPES_OF_TOKENS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def check_family(config: Any, core: type[nn.Module], *, text_only: bool = False) -> None:
    """Raise ConfigError for a model class whose inputs this library would compute wrongly.

    These classes are

    - models with recurrent layers, such as Mamba, except Qwen3.5 and Qwen3-Next, whose layers can process
      several tokens from a saved state;
    - models whose tokens attend to all later tokens, as in encoders;
    - models that read images by an encoder or cross-attention, such as Florence-2 and Llama 3.2 Vision;
    - models that are not listed in `FAMILIES` but compute their own positions (M-RoPE), or whose attention
      depends on token types, as among the tokens of an image in Gemma 3;
    - unlisted models with layers other than full or sliding-window attention;
    - models without a placeholder token for images.

    `core` is the class of the model without its head. Only the first two points are checked if `text_only`.
    """
    from transformers import MODEL_MAPPING

    text = config.get_text_config(decoder=True)
    layers = {core, MODEL_MAPPING.get(type(text), core)}
    stateful = all(getattr(one, "_is_stateful", False) for one in layers)
    if stateful and not text.model_type.startswith(CONTINUED):
        raise ConfigError(
            f"layers of a model of type '{config.model_type}' keep a state, from which they are not known to "
            f"go on with all tokens of an answer at once; {' and '.join(CONTINUED)} are"
        )
    text = getattr(config, "text_config", config)
    if getattr(text, "use_bidirectional_attention", None) == "all":
        raise ConfigError(
            f"tokens of a model of type '{config.model_type}' attend to later tokens; it writes no text"
        )
    if not text_only and config.model_type not in FAMILIES:
        _check_unlisted(config, core)


def _check_unlisted(config: Any, core: type[nn.Module]) -> None:
    """Raise ConfigError if a model class outside `FAMILIES` needs other rules than the default ones."""
    takes = signature(core.forward).parameters
    apart = any(name.startswith(("decoder_", "cross_attention", "image_attention")) for name in takes)
    if apart or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"a model of type '{config.model_type}' reads images by an encoder or by cross-attention, and "
            "prompts are read here as one sequence with images in the place of tokens; name a model of the "
            f"types {', '.join(sorted(FAMILIES))}"
        )
    reads = [f"`{name}`" for name in TYPES_OF_TOKENS if name in takes]
    if hasattr(core, "get_rope_index"):
        reads = ["positions of its own (`get_rope_index`)"]
    if reads:
        # Name the families with other positions than 0, 1, 2, ..., or with token types.
        known = sorted(name for name, one in FAMILIES.items() if one.types or one.positions is not linear)
        raise ConfigError(
            f"a model of type '{config.model_type}' reads {' and '.join(reads)}, which is known of "
            f"{', '.join(known)} only; it would be read otherwise than it was trained. Add the "
            "type to `mmrl.vision.models.model_families.FAMILIES`, as docs/howto/model.md shows"
        )
    if other := sorted({*attention_types(config.get_text_config(decoder=True))} - {*KNOWN_LAYERS}):
        raise ConfigError(
            f"a model of type '{config.model_type}' has layers of the type {', '.join(other)}, which are "
            f"known of listed models only; name a model of the types {', '.join(sorted(FAMILIES))}"
        )
    if not placeholders(config):
        raise ConfigError(
            f"the configuration of a model of type '{config.model_type}' names no token that stands for an "
            f"image (`image_token_id`); name a model of the types {', '.join(sorted(FAMILIES))}"
        )


def family_of(config: Any) -> VLMFamily:
    """Return the family rules for the `model_type` of a config, or default rules if it is not listed."""
    return FAMILIES.get(config.model_type, VLMFamily(linear, lambda core, inputs: {}))


def check_sounds(config: Any) -> None:
    """Raise ValueError unless the model of a config reads sounds."""
    if not family_of(config).sounds(config):
        raise ValueError(f"this model of type '{config.model_type}' is not known to read sounds")


def attention_of(config: Any, implementation: str) -> str | dict[str, str]:
    """Return the attention implementation; a dictionary by sub-config if some support only eager."""
    eager = dict.fromkeys(family_of(config).eager, "eager")
    return dict.fromkeys(("", *config.sub_configs), implementation) | eager if eager else implementation


def with_core(model: Any) -> Any:
    """Set `base_model` to the core that the family makes, if any; no submodule, so checkpoints omit it."""
    make = family_of(model.config).core
    if make and model.base_model is model:
        vars(model)[model.base_model_prefix] = make(model)
    return model


def num_positions(config: Any) -> int:
    """Return the number of positions that a model supports, with rotary scaling; 0 if unknown."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 0
    # Llama 4 is limited to its first chunk, where layers attend to all tokens and queries are not scaled.
    firsts = [getattr(config, name, None) for name in ("attention_chunk_size", "floor_scale")]
    if first := min(filter(None, firsts), default=0):
        return min(limit or first, first)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for scaled in (scaling, *(value for value in scaling.values() if isinstance(value, Mapping))):
        factor = scaled.get("factor") or 1
        limit = max(limit, int((scaled.get("original_max_position_embeddings") or limit) * factor))
    return limit


def check_length(length: float, limit: int) -> None:
    """Raise ValueError if a prompt of this length leaves no position for an answer; `limit` 0: no limit."""
    if limit and length >= limit:
        raise ValueError(
            f"it takes {length} positions, and the model has {limit}, answers included; shorten it"
        )


def check_max_length(length: int, most: int) -> None:
    """Raise ValueError for a row of more tokens than `max_length`; 0: no limit."""
    if most and length > most:
        raise ValueError(f"its {length} tokens exceed `max_length: {most}`, and rows are never cut; raise it")


def check_same_tokens(tokenizer: Any, model: nn.Module, policy: Any) -> None:
    """Raise ValueError unless a model can read the policy's encoded inputs; adopt its length limit."""
    own = policy.processor.tokenizer
    name = model.config.name_or_path
    if tokenizer.get_vocab() != own.get_vocab():
        raise ValueError(
            f"the model '{name}' has another vocabulary ({len(tokenizer)} tokens) than the policy "
            f"({len(own)} tokens), whose tokens it reads; name a model of the same family"
        )
    kinds = [one.config.model_type for one in (model, policy.model)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the model '{name}' is of type '{kinds[0]}' and the policy of type '{kinds[1]}', whose encoded "
            "images it reads; name a model of the same type"
        )
    # Also reject prompts that are too long for this model, before answers are generated.
    limits = {num_positions(model.config), policy.prompt_encoder.limit} - {0}
    policy.prompt_encoder.limit = min(limits, default=0)


def token_types(config: Any, ids: Tensor) -> Tensor:
    """Return token types in the shape of `ids`: 0 for text, the number of the kind of media elsewhere."""
    types = torch.zeros_like(ids)
    for kind, token in placeholders(config).items():
        types[ids == token] = MODALITIES[kind].token_type
    return types


def types_argument(config: Any) -> str:
    """Return the name of the model argument with token types, if attention depends on them; else empty."""
    family = family_of(config)
    return family.types if family.reads_types(config) else ""


def type_arguments(config: Any, ids: Tensor, after: Tensor | None = None) -> dict[str, Tensor]:
    """Return the forward arguments with token types (N, S), if attention or experts depend on them.

    `after` (N, S) is true for tokens after the prompt; None: all tokens belong to prompts.
    """
    family, name = family_of(config), types_argument(config)
    if not name:
        types = {}
    elif family.prefix_lm:
        types = {name: torch.zeros_like(ids) if after is None else after.to(ids)}
    else:
        types = {name: (family.kinds or token_types)(config, ids)}
    return types | family.experts(config, ids)
