"""Loading and saving models, processors and LoRA adapters with transformers and peft."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.config.registry import import_name
from mmrl.runtime.low_bit import quantize_as_checkpoint
from mmrl.runtime.modules import DTYPES, Derived, loading_onto, making_weights, model_source, placement
from mmrl.runtime.output_head import check_head
from mmrl.runtime.weights import (
    BASE,
    base_hash,
    check_adapter,
    check_base,
    check_settings,
    check_trainable,
    load_whole,
    read_adapter,
)
from mmrl.vision.models.model_families import (
    FAMILIES,
    attention_of,
    check_family,
    family_of,
    with_core,
)
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.models.text_processor import TextProcessor

ADAPTER = "adapter_model.safetensors"


@contextmanager
def _source(what: str, name: str) -> Iterator[str]:
    """Resolve a hub id or folder; errors inside the context become ConfigErrors that contain `name`."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield model_source(name)
    except (OSError, ValueError, RuntimeError, StrictDataclassError) as error:
        hint = ""
        if (Path(name) / ADAPTER).is_file() and what != "adapter":
            hint = "; it holds an adapter: name it as `policy.adapter`, and its base as `policy.model`"
        raise ConfigError(f"cannot load the {what} '{name}': {error}{hint}") from error


def load_model(name: str, *, dtype: str, attn_implementation: str) -> nn.Module:
    """Load a (vision-)language model from a hub id or folder, or return the object registered as `name`."""
    if objects.is_object(name):
        model = with_core(objects.get(name).eval())
        if getattr(model, "peft_config", None):
            raise ConfigError(
                f"the model is a {type(model).__name__} with adapters; give the model without them, and name "
                "the folder of a saved adapter as `policy.adapter`, or call `merge_and_unload()` first"
            )
        check_class(model.config)
        if (made := family_of(model.config).model) and not isinstance(model, import_name(made)):
            raise ConfigError(f"give a model of type '{model.config.model_type}' of the class `{made}`")
        check_head(model)
        return model
    with _source("model", name) as source:
        config, maker = read_config(source)
        attention = attention_of(config, attn_implementation)
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "attn_implementation": attention}
        if placement().empty and quantized_by(config) in ("", "bitsandbytes"):
            model = _empty_model(maker, config, options)
        else:
            place = {"": device} if (device := placement().device) else None
            options |= {"device_map": place, "trust_remote_code": False, "config": config}
            model = load_whole(maker, source, **options)
    with_core(model)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # 4-bit layers of bitsandbytes
            module.support_avx512bf16_for_cpu = False  # else they repack weights and lose gradients
    if not placement().empty:
        check_head(model)
    return model.eval()  # no dropout, not even in training


def check_folders(model: str, adapter: str = "") -> nn.Module | None:
    """Raise ValueError if a local model folder lacks weights, or if an adapter does not fit the model.

    Only the headers of weight files are read, and nothing is downloaded. Returns the model with weights on
    the meta device; None if the model is not a local folder, or is quantised.
    """
    if objects.is_object(model) or not Path(model).expanduser().is_dir():
        return None  # a hub id may not be downloaded yet
    with _source("model", model) as source:
        config, maker = read_config(source)
        if quantized_by(config):
            return None  # quantisers cannot run on the meta device
        whole = load_whole(maker, source, config=config, device_map={"": "meta"}, trust_remote_code=False)
    if not adapter:
        return whole
    with _source("adapter", adapter) as source:
        local = Path(source).is_dir()  # a hub id may not be downloaded yet
    if local:
        roles = sorted(file.parent for file in Path(source).glob(f"*/{ADAPTER}"))  # one adapter per role
        with warnings.catch_warnings():  # copies to the meta device do nothing and warn
            warnings.simplefilter("ignore")
            for folder in [source] if (Path(source) / ADAPTER).is_file() else roles or [source]:
                load_adapter(copy.deepcopy(whole), str(folder))
    return whole


def check_same_shapes(model: str, start: str) -> None:
    """Raise ValueError if initial weights (folder `start`) and `model` differ in names or shapes."""
    own, first = check_folders(model), check_folders(start)
    if own is None or first is None:
        return
    shapes = [{(name, *value.shape) for name, value in one.state_dict().items()} for one in (own, first)]
    if odd := sorted(shapes[0] ^ shapes[1]):
        raise ValueError(
            f"the weights in '{start}' are of another model than '{model}': {len(odd)} are in one of them "
            f"only or differ in shape, the first is {odd[0]}"
        )


def read_config(source: str) -> tuple[Any, Any]:
    """Read and check the config of a model; return it with the transformers class that loads the model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = model_config(source)
    check_class(config)
    if made := family_of(config).model:
        return config, import_name(made)
    return config, AutoModelForCausalLM if reads_text_only(config) else AutoModelForImageTextToText


def model_config(source: str) -> Any:
    """Read the config of a model; for an Omni model, which also speaks, the config of its thinker."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    return getattr(config, "thinker_config", config)


def check_class(config: Any) -> None:
    """Raise ConfigError if the model class of a config is not supported (see `check_family`)."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    if type(config) in MODEL_MAPPING:
        check_family(config, MODEL_MAPPING[type(config)], text_only=reads_text_only(config))
    elif config.model_type not in FAMILIES and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ConfigError(
            f"transformers has no class of a model of type '{config.model_type}' without its head, whose "
            f"hidden states are read here; name a model of the types {', '.join(sorted(FAMILIES))}"
        )


def _empty_model(maker: Any, config: Any, options: dict[str, Any]) -> nn.Module:
    """Create a model on the meta device, with quantised layers if its checkpoint is quantised."""
    from transformers.initialization import no_init_weights

    with making_weights(), no_init_weights():  # some initialisations fail on the meta device
        model = maker.from_config(config, trust_remote_code=False, **options)
        model.tie_weights()  # transformers does not tie weights if it skips initialisation
    if quantized_by(config):
        quantize_as_checkpoint(model, config.quantization_config)
    return model


def quantized_by(config: Any) -> str:
    """Return the name of the library that quantised a checkpoint; empty if it is not quantised."""
    settings = getattr(config, "quantization_config", None) or {}
    return settings["quant_method"] if settings else ""


def reads_text_only(config: Any) -> bool:
    """Return whether a model is a language model without vision; raise ValueError if it writes no text."""
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
    """Load the processor of a model: tokenizer, chat template, image and video processors."""
    if objects.is_object(name):
        return objects.get(f"{name}/processor")
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.utils import cached_file

    # With these options, `cached_file` returns None for a missing file instead of raising.
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with _source("processor of", name) as source:
        config = model_config(source)
        if reads_text_only(config):
            return TextProcessor(AutoTokenizer.from_pretrained(source, trust_remote_code=False))
        files = ("preprocessor_config.json", "processor_config.json")
        if not any(cached_file(source, file, **quiet) for file in files):
            raise ValueError(
                f"it has no image processor ({' or '.join(files)}); copy the file from the model that this "
                "one was made from"
            )
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
        if not processor.chat_template:
            processor.chat_template = (
                processor.tokenizer.chat_template or family_of(config).chat_template or None
            )
        return processor


def load_encoder(name: str, **options: Any) -> PromptEncoder:
    """Load a model's `PromptEncoder` with `options`, without loading the weights of the model."""
    if objects.is_object(name):
        return PromptEncoder(load_processor(name), with_core(objects.get(name)).base_model, **options)
    with _source("model", name) as source:
        config, _ = read_config(source)

    def make() -> nn.Module:
        with loading_onto(None, empty=True):
            return load_model(name, dtype="bfloat16", attn_implementation="eager")

    core = cast(nn.Module, WithoutWeights(config, make))
    return PromptEncoder(load_processor(name), core, **options)


def add_adapter(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    tower: bool,
    layers: Sequence[str] = (),
    names: Sequence[str] = ("default",),
) -> nn.Module:
    """Add LoRA adapters to the linear layers of a model, except its output head.

    Args:
        model: The model.
        rank: LoRA rank.
        alpha: LoRA alpha; updates are scaled by alpha / rank.
        tower: Whether to adapt the vision tower, too.
        layers: Suffixes of the names of layers to adapt; empty: all linear layers.
        names: Names of the adapters; one adapter is added for each.
    """
    from peft import LoraConfig, get_peft_model

    name_of = {id(module): name for name, module in model.named_modules()}
    decoder = name_of[id(model.get_decoder())]
    heads = {name_of.get(id(module)) for module in model.get_output_embeddings().modules()}
    frozen = family_of(model.config).frozen
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name not in heads
        and not (frozen and frozen in name.split("."))
        and (tower or name.startswith(decoder + "."))
        # Skip subclasses of Linear, such as the router of Llama 4, which returns a pair.
        and not type(module).__module__.startswith("transformers.models")
    ]
    if missing := [end for end in layers if not any(f".{name}".endswith(f".{end}") for name in linear)]:
        available = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        raise ConfigError(
            f"'policy.lora_target_modules' names '{missing[0]}', but no linear layer that learns ends so; "
            f"there are {available}"
        )
    chosen = [name for name in linear if not layers or f".{name}".endswith(tuple(f".{x}" for x in layers))]
    # Replace block numbers by a pattern, to keep the saved adapter's config short. Keep a number at the end
    # of a name (`proj.0`), because the pattern would also match entries that are not linear (`proj.1`).
    pattern = "|".join(
        dict.fromkeys(re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", re.escape(name)) for name in chosen)
    )
    # For mixtures of experts, peft cuts patterns to the last parts of names, which match other towers, too.
    target = chosen if getattr(model.config.get_text_config(), "num_experts", None) else pattern
    # No dropout: log-probabilities in training must equal those of the rollout.
    configs = [LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=target) for _ in names]
    base = base_hash(model.parameters())
    adapted = get_peft_model(model, configs[0], names[0])
    vars(adapted)[BASE] = base
    for name, config in zip(names[1:], configs[1:], strict=True):
        adapted.add_adapter(name, config)
    return adapted


def load_adapter(model: nn.Module, name: str, *, rank: int = 0, alpha: float | None = None) -> nn.Module:
    """Load a saved LoRA adapter (hub id or folder, safetensors) into a model, with trainable weights.

    Raises ValueError if the adapter belongs to another model, if weights are missing or not finite, or if
    `rank` (0: any) or `alpha` (None: any) differ from the saved values.
    """
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
    from transformers.utils import cached_file

    with _source("adapter", name) as source:
        file = cached_file(source, ADAPTER, _raise_exceptions_for_missing_entries=False)
        if file is None:
            raise ValueError(f"it holds no '{ADAPTER}' (an adapter_model.bin is not read); save it anew")
        config = PeftConfig.from_pretrained(source)
        if not isinstance(config, LoraConfig):
            raise ValueError(
                f"it is an adapter of the kind {config.peft_type}, and only LoRA is trained here"
            )
        check_trainable(config, name)
        options = {"lora_rank": (rank or config.r, config.r), "lora_alpha": (alpha, config.lora_alpha)}
        for option, (wanted, saved) in options.items():
            if wanted not in (None, saved):
                raise ValueError(f"it has {option} {saved}, not {wanted}; set `{option}: {saved}`")
        weights, header = read_adapter(Path(file))
        base = header.get(BASE, "")
        own = base_hash(model.parameters()) if base else ""
        check_base(base, own, name)
        named, given = config.base_model_name_or_path or "", model.config.name_or_path
        if not base and Path(named).name != Path(given).name:
            warnings.warn(f"the adapter '{name}' names the base model '{named}', not '{given}'", stacklevel=2)
        try:
            adapted = PeftModel.from_pretrained(model, source, is_trainable=True)
        except RuntimeError as error:  # tensor shapes differ
            raise ValueError(f"it does not fit the model: {error}") from error
        vars(adapted)[BASE] = own or base_hash(model.parameters())
        check_adapter(weights, get_peft_model_state_dict(adapted), name)
        return adapted


def load_adapter_weights(adapter: nn.Module, folder: Path, name: str = "default") -> None:
    """Load saved adapter weights into the adapter `name` of a model, bit for bit.

    Raises ValueError if weights are missing or unknown, or if the adapters differ in scale or base model.
    """
    from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict

    weights, header = read_adapter(folder / ADAPTER)
    check_settings(PeftConfig.from_pretrained(str(folder)), adapter.peft_config[name], folder)
    check_adapter(weights, get_peft_model_state_dict(adapter, adapter_name=name), folder)
    check_base(header.get(BASE, ""), vars(adapter).get(BASE, ""), folder)
    set_peft_model_state_dict(adapter, weights, adapter_name=name)


def save_adapter(adapter: nn.Module, folder: Path) -> None:
    """Save an adapter with peft, and add a hash of the base weights to the header of its file."""
    from safetensors.torch import load_file, save_file

    adapter.save_pretrained(str(folder))
    if base := vars(adapter).get(BASE, ""):
        for file in folder.rglob(ADAPTER):  # with several roles, each adapter has its own folder
            save_file(load_file(file), file, {"format": "pt", BASE: base})


class WithoutWeights:
    """Model without head and weights; `make` builds it when any attribute except `config` is first read."""

    def __init__(self, config: Any, make: Callable[[], nn.Module]) -> None:
        self.config, self.core = config, cache(lambda: make().base_model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core(), name)


class TokenPolicy(Protocol):
    """Attributes of a token policy that engines use."""

    prompt_encoder: PromptEncoder
    model: nn.Module
    core: nn.Module  # the model without its head
    compute: torch.dtype  # precision of autocast
    share_prefix: bool  # whether rows with the same prompt share its keys and values


class EngineModel:
    """Token policy for an engine: a pruned or quantised copy of a policy's model, kept up to date."""

    def __init__(self, policy: TokenPolicy, transforms: Sequence[Callable]) -> None:
        self.prompt_encoder, self.compute = policy.prompt_encoder, policy.compute
        self.share_prefix, self._derived = policy.share_prefix, Derived(policy.model, transforms)

    @property
    def model(self) -> nn.Module:
        """The transformed model, with the current weights of the policy."""
        return self._derived()

    @property
    def core(self) -> nn.Module:
        """The transformed model without its head."""
        return self.model.base_model
