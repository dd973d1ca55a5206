"""Loading and saving models, processors and LoRA adapters with transformers and peft."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.runtime.low_bit import quantize_as_checkpoint
from mmrl.runtime.modules import DTYPES, Derived, making_weights, model_source, placement
from mmrl.runtime.output_head import check_head
from mmrl.vision.models.model_families import check_family
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.models.text_processor import TextProcessor

ADAPTER = "adapter_model.safetensors"


@contextmanager
def _source(what: str, name: str) -> Iterator[str]:
    """Resolve the name of a model folder; errors inside the block name what could not be loaded."""
    try:
        yield model_source(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the {what} '{name}': {error}") from error


def load_model(name: str, *, dtype: str, attn_implementation: str) -> nn.Module:
    """Load a model that writes text, by hub id or folder, from safetensors only; or take an object."""
    if objects.is_object(name):
        model = objects.get(name).eval()
        _check_known(model.config)
        check_head(model)
        return model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    device = placement().device
    with _source("model", name) as source:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _check_known(config)
        maker = AutoModelForCausalLM if reads_text_only(config) else AutoModelForImageTextToText
        options = {"dtype": DTYPES[dtype], "attn_implementation": attn_implementation}
        if placement().empty and quantized_by(config) in ("", "bitsandbytes"):
            model = _empty_model(maker, config, options)
        else:
            model = maker.from_pretrained(
                source,
                device_map=device and {"": device},
                use_safetensors=True,  # a pickle could run any code
                trust_remote_code=False,
                **options,
            )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # 4-bit layers of bitsandbytes in the checkpoint
            module.support_avx512bf16_for_cpu = False  # weights repacked for this have no gradient
    if not placement().empty:
        check_head(model)
    return model.eval()  # without dropout, in training too


def _check_known(config: Any) -> None:
    """Raise ConfigError for a model that would be read otherwise than it was trained, by its class alone."""
    from transformers import MODEL_MAPPING

    if type(config) in MODEL_MAPPING:
        check_family(config, MODEL_MAPPING[type(config)], text_only=reads_text_only(config))


def _empty_model(maker: Any, config: Any, options: dict[str, Any]) -> nn.Module:
    """Make a model whose weights have shapes alone, in few bits where those of its checkpoint are."""
    from transformers.initialization import no_init_weights

    with making_weights(), no_init_weights():  # some draws of transformers need numbers that are not there
        model = maker.from_config(config, trust_remote_code=False, **options)
        model.tie_weights()  # without draws, transformers leave it out
    if quantized_by(config):
        quantize_as_checkpoint(model, config.quantization_config)
    return model


def quantized_by(config: Any) -> str:
    """Name the library whose few bits a checkpoint has, as its configuration does; none: empty."""
    settings = getattr(config, "quantization_config", None) or {}
    return settings["quant_method"] if settings else ""


def reads_text_only(config: Any) -> bool:
    """Whether a model of transformers is a language model; raises ValueError where it writes no text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    raise ValueError(
        f"a model of type '{config.model_type}' writes no text; name a vision-language model, or a language "
        "model"
    )


def load_processor(name: str) -> Any:
    """Load the processor of a model: tokenizer, chat template, and what reads images and videos."""
    if objects.is_object(name):
        return objects.get(f"{name}/processor")
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer
    from transformers.utils import cached_file

    # Without these, `cached_file` raises for a missing file instead of returning None.
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with _source("processor of", name) as source:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if reads_text_only(config):
            return TextProcessor(AutoTokenizer.from_pretrained(source, trust_remote_code=False))
        files = ("preprocessor_config.json", "processor_config.json")
        if not any(cached_file(source, file, **quiet) for file in files):
            raise ValueError(
                f"it has no image processor ({' or '.join(files)}); copy the file from the model that this "
                "one was made from"
            )
        return AutoProcessor.from_pretrained(source, trust_remote_code=False)


def add_adapter(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    tower: bool,
    layers: Sequence[str] = (),
    names: Sequence[str] = ("default",),
) -> nn.Module:
    """Add LoRA to the linear layers of the language model, and of the vision tower, but not to the head.

    Args:
        model: The model.
        rank: Of the adapters.
        alpha: Their scale, times 1 / rank.
        tower: Whether the vision tower gets them too.
        layers: The ends of the names of the layers; empty: all of them.
        names: Each is an adapter of its own.
    """
    from peft import LoraConfig, get_peft_model

    known = {id(module): name for name, module in model.named_modules()}
    decoder, head = known[id(model.get_decoder())], known[id(model.get_output_embeddings())]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != head and (tower or name.startswith(decoder + "."))
    ]
    if missing := [end for end in layers if not any(f".{name}".endswith(f".{end}") for name in linear)]:
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        raise ConfigError(
            f"'policy.lora_target_modules' names '{missing[0]}', but no linear layer that learns ends so; "
            f"there are {known}"
        )
    chosen = [name for name in linear if not layers or f".{name}".endswith(tuple(f".{x}" for x in layers))]
    # One pattern with the numbers of blocks left open keeps the config of a saved adapter readable. A number
    # at the end of a name stays: other entries of the same list need not be linear layers.
    pattern = "|".join(
        dict.fromkeys(re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", re.escape(name)) for name in chosen)
    )
    # Dropout would make the log-probabilities of training differ from those of the rollout.
    configs = [LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=pattern) for _ in names]
    adapted = get_peft_model(model, configs[0], names[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        adapted.add_adapter(name, config)
    return adapted


def load_adapter(model: nn.Module, name: str) -> nn.Module:
    """Load a saved adapter (hub id or folder, safetensors only) onto a model, as trainable."""
    from peft import PeftModel
    from transformers.utils import cached_file

    with _source("adapter", name) as source:
        if cached_file(source, ADAPTER, _raise_exceptions_for_missing_entries=False) is None:
            raise ValueError(f"it holds no '{ADAPTER}' (an adapter_model.bin is not read); save it anew")
        return PeftModel.from_pretrained(model, source, is_trainable=True)


def load_adapter_weights(adapter: nn.Module, folder: Path, name: str = "default") -> None:
    """Load the weights of a saved adapter into one that is there, bit for bit.

    Raises `ValueError` where the folder lacks weights of the adapter, has others, or scales them otherwise.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    saved, own = load_file(folder / ADAPTER), get_peft_model_state_dict(adapter, adapter_name=name)
    shapes = [{(name, *value.shape) for name, value in weights.items()} for weights in (own, saved)]
    if odd := sorted(shapes[0] ^ shapes[1]):
        raise ValueError(
            f"the adapter in '{folder}' does not fit the policy's: {len(odd)} weights are on one side only "
            f"or differ in shape, the first is {odd[0]}; set `lora_rank` and `freeze_vision_tower` alike"
        )
    alphas = [
        json.loads((folder / "adapter_config.json").read_text())["lora_alpha"],
        adapter.peft_config[name].lora_alpha,
    ]
    if alphas[0] != alphas[1]:
        raise ValueError(
            f"the adapter in '{folder}' has `lora_alpha` {alphas[0]}, the policy's has {alphas[1]}, which "
            "scales it otherwise; set `lora_alpha` as it was"
        )
    set_peft_model_state_dict(adapter, saved, adapter_name=name)


def checkpoint_layers(model: nn.Module) -> None:
    """Switch on gradient checkpointing. Only the layers are in training mode, so dropout stays off."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # transformers 5.23 renamed the method. Reentrant checkpointing would cut the graph at frozen embeddings.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


class TokenPolicy(Protocol):
    """What an engine needs of a token policy."""

    prompt_encoder: PromptEncoder
    model: nn.Module
    core: nn.Module  # the model without its head
    compute: torch.dtype  # of autocast
    share_prefix: bool  # whether rows with the same prompt share its keys and values


class EngineModel:
    """A token policy whose model went through transforms (pruning, quantisation), on the policy's weights."""

    def __init__(self, policy: TokenPolicy, transforms: Sequence[Callable]) -> None:
        self.prompt_encoder, self.compute = policy.prompt_encoder, policy.compute
        self.share_prefix, self._derived = policy.share_prefix, Derived(policy.model, transforms)

    @property
    def model(self) -> nn.Module:
        """The transformed model; it follows the policy's weights."""
        return self._derived()

    @property
    def core(self) -> nn.Module:
        """The transformed model without its head."""
        return self.model.base_model


def check_same_tokens(tokenizer: Any, model: nn.Module, policy: Any) -> None:
    """Raise `ValueError` unless a model reads the tokens and the encoded images of a policy."""
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
