"""Loading of flow-matching pipelines of diffusers, with all weights and without running their code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.diffusion.schedule import check_scheduler
from mmrl.runtime.low_bit import quantize_blocks
from mmrl.runtime.modules import (
    DTYPES,
    copy_weights,
    loading_onto,
    making_weights,
    model_source,
    placement,
    widest_dtype,
)
from mmrl.runtime.weights import load_whole

LIBRARIES = (None, "diffusers", "transformers")  # allowed sources of a pipeline's classes


def load_pipeline(
    name: str,
    *,
    dtype: str,
    on_cpu: Callable[[str], bool] = lambda part: False,
    later: Callable[[str], bool] = lambda part: False,
    bits: int | None = None,
) -> Any:
    """Load a frozen pipeline from a hub id or folder, or take a registered pipeline object.

    Never runs code of the folder. Raises `ValueError` for missing weights, or if an object has LoRA layers.

    Args:
        name: Hub id, folder or registered object.
        dtype: Name of the dtype of the weights.
        on_cpu: Maps a component name to whether its network is loaded into CPU memory, not onto the device.
        later: Maps a component name to whether its network gets fake weights, until `load_part` loads it.
        bits: Bits per weight in the blocks of text encoders, 4 or 8; None: as `dtype`.
    """
    if objects.is_object(name):
        pipe = objects.get(name)
        check_scheduler(type(pipe.scheduler).__name__, pipe.scheduler.config)
        check_plain(pipe)
    else:
        pipe = _read_pipeline(name, dtype, on_cpu, later, bits)
    pipe.set_progress_bar_config(disable=True)
    for module in modules_of(pipe):
        module.requires_grad_(False).eval()
    return pipe


def config_of(name: str) -> Mapping[str, Any]:
    """Return the configuration of a pipeline (hub id, folder or object) without loading weights.

    Raises `ValueError` if the scheduler of a hub id or folder is not for flow matching.
    """
    if objects.is_object(name):
        pipe = objects.get(name)
        return {**pipe.config, "_class_name": type(pipe).__name__}
    with _explained(f"the pipeline '{name}'"):
        return _parts_of(name)[1]


def class_of(name: str) -> str:
    """Return the class name of a pipeline (hub id, folder or object) without loading weights."""
    return config_of(name)["_class_name"]


def check_weights(name: str) -> None:
    """Raise `ValueError` if a pipeline's folder lacks weights of a network; reads only file headers."""
    if objects.is_object(name) or not Path(name).expanduser().is_dir():
        return  # files of a hub model may not be downloaded yet
    with _explained(f"the pipeline '{name}'"):
        source, parts = _parts_of(name)
        for part, kind in _networks_in(parts).items():
            load_whole(kind, source, subfolder=part, device_map={"": "meta"})


def check_plain(pipe: Any) -> None:
    """Raise `ValueError` if a network of a pipeline object already carries a LoRA adapter."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and (adapters := getattr(part, "peft_config", None)):
            raise ConfigError(
                f"the pipeline's {name} carries the LoRA adapter {', '.join(map(repr, adapters))}, of "
                "`load_lora_weights` or of an earlier trainer; call `pipe.fuse_lora()` first to keep what it "
                "does, then `pipe.unload_lora_weights()`, or load the pipeline anew"
            )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Convert errors of reading files to a `ConfigError` that starts with `cannot load` and `what`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot load {what}: {error}") from error


def _parts_of(name: str) -> tuple[str, dict[str, Any]]:
    """Return a pipeline's source and component classes; raises unless its scheduler is for flow matching."""
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("policy 'diffusion.flow' needs diffusers; install mmrl[diffusion]") from error
    source = model_source(name)
    parts: Any = diffusers.DiffusionPipeline.load_config(source)
    _check_no_code(parts)
    if kind := getattr(diffusers, str(parts["scheduler"][1]), None):
        check_scheduler(kind.__name__, kind.load_config(source, subfolder="scheduler"))
    return source, parts


def _networks_in(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Map the component names of a pipeline's networks to their classes."""
    named = {
        part: origin for part, origin in parts.items() if type(origin) is list and origin != [None, None]
    }
    kinds = {part: getattr(_library(library), kind) for part, (library, kind) in named.items()}
    return {part: kind for part, kind in kinds.items() if issubclass(kind, nn.Module)}


def _is_part_of_diffusers(library: Any) -> bool:
    """Return whether `library` names a pipeline folder inside diffusers, such as `ltx2`."""
    from diffusers import pipelines

    return type(library) is str and library.isidentifier() and hasattr(pipelines, library)


def _library(name: str) -> Any:
    """Import the library, or the pipeline folder of diffusers, that defines a component class."""
    return importlib.import_module(f"diffusers.pipelines.{name}" if _is_part_of_diffusers(name) else name)


def load_part(name: str, part: str, *, dtype: str, bits: int | None = None) -> nn.Module:
    """Load one frozen component of a pipeline (hub id or folder) into CPU memory."""
    with _explained(f"the part '{part}' of the pipeline '{name}'"):
        source, parts = _parts_of(name)
        network = load_whole(_networks_in(parts)[part], source, subfolder=part, dtype=DTYPES[dtype])
        network = _in_bits(network, bits)
    return network.requires_grad_(False).eval()


def _in_bits(network: nn.Module, bits: int | None) -> nn.Module:
    """Quantise a text or image encoder (a transformers model); return other networks unchanged."""
    from transformers import PreTrainedModel

    return quantize_blocks(network, bits) if bits and isinstance(network, PreTrainedModel) else network


def _read_pipeline(
    name: str, dtype: str, on_cpu: Callable[[str], bool], later: Callable[[str], bool], bits: int | None
) -> Any:
    """Load a pipeline of a hub id or folder from safetensors files."""
    with _explained(f"the pipeline '{name}'"):
        source, parts = _parts_of(name)
        # Pass missing optional components as None, because diffusers requires them otherwise.
        absent = {part: None for part, origin in parts.items() if origin == [None, None]}
        # Networks are loaded onto the device file by file; with several GPUs, onto the current one.
        device, wanted = placement().device, DTYPES[dtype]
        on = {"": device.type} if device else None
        networks: dict[str, nn.Module] = {}
        for part, kind in _networks_in(parts).items():
            if placement().empty or later(part):
                with loading_onto(None, empty=True):
                    networks[part] = _of_config(kind, source, part, wanted)
            else:
                place = None if on_cpu(part) else on
                networks[part] = load_whole(kind, source, subfolder=part, dtype=wanted, device_map=place)
            networks[part] = _in_bits(networks[part], bits)
        library = importlib.import_module("diffusers")
        # The base class `DiffusionPipeline` would load optional components despite `absent`.
        pipeline: Any = getattr(library, parts["_class_name"], library.DiffusionPipeline)
        return pipeline.from_pretrained(
            source,
            device_map=device and device.type,
            use_safetensors=True,
            trust_remote_code=False,
            **absent,
            **networks,
        )


def _check_no_code(parts: Mapping[str, Any]) -> None:
    """Raise `ValueError` if classes are defined in the model folder; older diffusers would run that code."""
    own = [
        part
        for part, origin in parts.items()
        if (part == "_class_name" and type(origin) is not str)
        or (
            type(origin) is list
            and len(origin) == 2
            and origin[0] not in LIBRARIES
            and not _is_part_of_diffusers(origin[0])
        )
    ]
    if own:
        raise ValueError(
            f"it wants code that is not part of {' and '.join(LIBRARIES[1:])} for {', '.join(own)}; no code "
            "of a model folder is run"
        )


def _of_config(kind: Any, source: str, part: str, dtype: torch.dtype) -> nn.Module:
    """Build a network with fake weights, without data, from the configuration in a pipeline's folder."""
    kept = kind._keep_in_fp32_modules
    with making_weights():
        if hasattr(kind, "load_config"):
            network = kind.from_config(kind.load_config(source, subfolder=part))
        else:
            from transformers import AutoConfig
            from transformers.initialization import no_init_weights

            config = AutoConfig.from_pretrained(source, subfolder=part, trust_remote_code=False)
            with no_init_weights():  # initialisers may read data, which fake tensors lack
                network = kind(config)
            network.tie_weights()  # normally done by the initialisation that is skipped
            kept = kept if dtype == torch.float16 else ()  # as in transformers, float32 for float16 only
    for name, weight in network.state_dict(keep_vars=True).items():
        if weight.is_floating_point() and not set(kept or ()) & set(name.split(".")):
            weight.data = weight.data.to(dtype)
    return network


def modules_of(pipe: Any, but: Collection[str] = ()) -> Iterator[nn.Module]:
    """Iterate over the networks of a pipeline, except the components named in `but`."""
    for name, part in pipe.components.items():
        match part:
            case nn.Module() if name not in but:
                yield part


def load_network(network: nn.Module, folder: Path, name: str = "transformer") -> None:
    """Load the weights of the network `name` from the folder of a saved pipeline, bit for bit."""
    # Read in the widest dtype of the network and the file, so that no weight is rounded.
    with _explained(f"the pipeline in '{folder}'"):
        widest = widest_dtype(network, folder / name)
        saved = load_whole(type(network), folder, subfolder=name, dtype=widest)
    copy_weights(network, saved)
