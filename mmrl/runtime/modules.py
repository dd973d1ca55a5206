"""Helpers for models: weight sources, placement, precision, transforms, evaluation mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mmrl.runtime.fsdp import sharded_parts

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
LOW = (torch.bfloat16, torch.float16)
RECORD = "mmrl_transforms"  # attribute of a model that lists its transforms
LATER = "mmrl_float32_later"  # attribute of parameters that become float32 once they are sharded


def model_source(name: str) -> str:
    """Return the folder or hub id of a model; raises `ValueError` for a missing folder."""
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return str(folder)
    home = folder.parent
    is_path = home.is_dir() and home != Path()  # e.g. "runs/model" if a folder "runs" exists
    looks_like_path = name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1
    if is_path or folder.is_file() or looks_like_path:
        inside = sorted(path.name for path in home.iterdir() if path.is_dir())[:5] if is_path else []
        raise ValueError(
            f"there is no folder '{name}'"
            + (f"; '{home}' holds the folders {', '.join(inside)}" if inside else "")
            + "; name a folder that holds a model, or a model of the hub as owner/name"
        )
    return name


@dataclass(frozen=True)
class Placement:
    """Device (None: main memory) and purpose of loaded models; `loading_onto` explains the fields."""

    device: torch.device | None = None
    learns: bool = True
    shards: bool = False
    empty: bool = False


TRAINING = Placement()
_PLACEMENT: ContextVar[Placement] = ContextVar("placement", default=TRAINING)


@contextmanager
def loading_onto(
    device: torch.device | None, *, learns: bool = True, shards: bool = False, empty: bool = False
) -> Iterator[None]:
    """Load models inside this context directly onto a device, file by file, without a copy in main memory.

    Args:
        device: Target device; None: main memory, where processes share memory-mapped weights.
        learns: Convert trained weights to float32.
        shards: Convert trained weights only after FSDP2 has sharded them (`Processes.place`), so that no
            process holds a float32 copy of the model.
        empty: Create fake weights (shapes only) without reading weight files, to estimate memory.
    """
    token = _PLACEMENT.set(Placement(device, learns, shards, empty))
    try:
        yield
    finally:
        _PLACEMENT.reset(token)


def placement() -> Placement:
    """Return the placement that `loading_onto` set, or the default for training."""
    return _PLACEMENT.get()


@cache
def _fake() -> FakeTensorMode:
    # Allow real inputs, such as token ids, in fake modules.
    return FakeTensorMode(allow_non_fake_inputs=True)


def making_weights() -> AbstractContextManager:
    """Create fake weights inside this context if `loading_onto` has `empty`.

    Results computed from fake weights are fake as well, and take neither memory nor time.
    """
    return _fake() if placement().empty else nullcontext()


class _Values(torch.autograd.Function):
    """Autograd function that replaces a tensor by zeros, but keeps it in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def with_values(tensor: Tensor) -> Tensor:
    """Replace a fake tensor by zeros, for code that branches on values; return a real tensor unchanged.

    The autograd graph of the fake tensor stays, so that memory for the backward pass is counted.
    """
    return _Values.apply(tensor) if isinstance(tensor, FakeTensor) else tensor


def keep_training_precision(model: nn.Module, *, now: bool = False) -> None:
    """Convert trained weights to float32, since updates of 1e-6 vanish in 16 bits.

    Weights that FSDP2 will shard are only marked for conversion, unless `now` (used for saved adapters).
    """
    for parameter in model.parameters() if placement().learns else ():
        if parameter.requires_grad and parameter.dtype in LOW:
            if placement().shards and not now:
                vars(parameter)[LATER] = True
            else:
                parameter.data = parameter.data.float()  # in place: others hold this Parameter object


def stored_dtypes(folder: Path) -> dict[str, str]:
    """Map every weight in the safetensors files of a folder to the name of its dtype, such as "BF16"."""
    from safetensors import SafetensorError, safe_open

    dtypes: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                dtypes |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read the weights in '{path}': {error}") from error
    return dtypes


def widest_dtype(model: nn.Module, folder: Path) -> torch.dtype:
    """Return the widest floating dtype of a model and of the safetensors files in a folder."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtypes |= {STORED[name] for name in set(stored_dtypes(folder).values()) if name in STORED}
    return max(dtypes, key=lambda dtype: dtype.itemsize)


@torch.no_grad()
def copy_weights(model: nn.Module, saved: nn.Module) -> None:
    """Copy the weights of `saved`, a model of the same architecture, into `model` bit for bit.

    A trained 16-bit weight is converted to the dtype of the saved weight: models for inference are loaded in
    16 bits, but checkpoints store trained weights in float32.
    """
    weights, trained = saved.state_dict(), {id(p): p for p in model.parameters() if p.requires_grad}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in trained and value.dtype in LOW:
            value.data = weights[name].to(value.device)
        else:
            value.copy_(weights[name])  # in place, since the optimizer and engines refer to these tensors


def apply_transforms(model: nn.Module, transforms: Sequence[Callable]) -> nn.Module:
    """Apply transforms to a model in order, and return the result."""
    for transform in transforms:
        model = transform(model)
    return model


def applied_transforms(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """List the transforms applied to a model as `{"name": ..., option: ...}`, in order of application."""
    return vars(model).get(RECORD, ())


def record_transform(view: nn.Module, model: nn.Module, name: str, options: Mapping[str, Any]) -> nn.Module:
    """Record a transform of `model` in the result `view`; raise `ValueError` if `model` already has it."""
    for done in applied_transforms(model):
        if done["name"] == name:
            raise ValueError(
                f"the transform '{name}' was applied to this model already, with "
                f"{ {key: value for key, value in done.items() if key != 'name'} }; apply it once, with the "
                "options you want"
            )
    vars(view)[RECORD] = (*applied_transforms(model), {"name": name, **options})
    return view


def twin(model: nn.Module) -> nn.Module:
    """Copy the modules, settings and hooks of a model; the copy shares the model's weight tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        # The first call of an 8-bit bitsandbytes layer moves codes and scales from the weight to the layer.
        # With a shared weight, the call of the copy would leave the model without scales: move them now.
        if hasattr(module, "init_8bit_state"):
            if module.weight.CB is not None:
                module.init_8bit_state()
            tensors += [value for value in vars(module.state).values() if isinstance(value, torch.Tensor)]
    # Put weight tensors into the memo of `deepcopy`, so that both models share them.
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


class Derived:
    """A transformed copy of a model, which shares its weights and follows their changes in training.

    If a transform quantised or sliced weights, the copy is rebuilt after each change of the originals.
    """

    def __init__(self, model: nn.Module, transforms: Sequence[Callable]) -> None:
        self.model, self.transforms = model, transforms
        self.made: nn.Module | None = None
        self._read: list[nn.Parameter] = []  # original weights that transforms replaced
        self._stamp: Any = None

    def __call__(self) -> nn.Module:
        """Return the transformed copy of the model, rebuilt if the original weights require it."""
        if self.made is None and sharded_parts(self.model):
            raise ValueError(
                "an engine's own transforms need whole weights on every process, but these are sharded; give "
                "them to the policy (`policy.transform`), or train without sharding"
            )
        if self.made is None or self._stamp != self._look():
            self.made = derived = apply_transforms(twin(self.model), self.transforms)
            copied = {id(tensor) for tensor in (*derived.parameters(), *derived.buffers())}
            shared = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
            parameters = list(self.model.parameters())
            # Watch the originals that the copy replaced; if it only added weights, watch all originals.
            replaced = [parameter for parameter in parameters if id(parameter) not in copied]
            self._read = replaced or (parameters if copied - shared else [])
            self._stamp = self._look()
        return self.made

    def _look(self) -> Any:
        """Return a stamp of the weights; it changes if a weight is written in place, moved or replaced."""
        identities = tuple(id(p) for p in self.model.parameters())
        return identities, tuple((p._version, p.data_ptr()) for p in self._read)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode inside this context; then restore the mode of every submodule."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def reward_device(device: str) -> str:
    """Resolve the device `auto` to the current GPU, or the CPU; return other names unchanged."""
    if device != "auto":
        return device
    # Include the device index, because rewards run in threads with another current device.
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def checkpoint_layers(model: nn.Module) -> None:
    """Enable gradient checkpointing; only checkpointed layers get training mode, so dropout stays off."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # transformers 5.23 renamed the method. Reentrant checkpointing gives no gradient after frozen embeddings.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
