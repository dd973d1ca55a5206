"""Folders of reward models: a sequence classifier of transformers, or a language model with a score layer.

transformers has a class for sequence classification of some families only (Qwen2, Qwen3, Llama, Gemma 3,
Qwen3.5). Folders of these load with `AutoModelForSequenceClassification`. For other families (Qwen2.5-VL),
and for adapters, the linear layer that computes the score is in a file of its own, `SCORE`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.runtime.modules import DTYPES, copy_weights, model_source, placement, widest_dtype
from mmrl.runtime.weights import load_whole
from mmrl.vision.models import loading

SCORE = "score.safetensors"  # linear layer (labels, width) `score.weight`, and the labels in the header
LABELS = "labels"
ENDING = "ForSequenceClassification"


def classifier_class(config: Any) -> Any:
    """Return the class of transformers for sequence classification of a config's type; None without one."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

    return CLASSES.get(type(config), None)


def is_classifier(name: str) -> bool:
    """Whether a folder or hub id has a sequence classifier of transformers."""
    from transformers import AutoConfig

    if objects.is_object(name):
        return False
    try:
        config = AutoConfig.from_pretrained(model_source(name), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the model '{name}': {error}") from error
    return any(str(kind).endswith(ENDING) for kind in config.architectures or ())


def load_classifier(source: str | Path, **options: Any) -> nn.Module:
    """Load a sequence classifier; options are those of `from_pretrained`."""
    from transformers import AutoModelForSequenceClassification

    try:
        return load_whole(
            AutoModelForSequenceClassification, model_source(str(source)), trust_remote_code=False, **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the reward model '{source}': {error}") from error


def load_backbone(name: str, *, dtype: str, attn_implementation: str) -> nn.Module:
    """Load a language model, or a sequence classifier as a language model with a dummy output head.

    The dummy head is tied to the input embeddings and never used.
    """
    if placement().empty or not is_classifier(name):
        return loading.load_model(name, dtype=dtype, attn_implementation=attn_implementation)
    from accelerate import init_empty_weights

    config, maker = loading.read_config(model_source(name))
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = True
    place = {"": device} if (device := placement().device) else None
    options = {"dtype": DTYPES[dtype], "attn_implementation": attn_implementation}
    read: Any = load_classifier(name, device_map=place, **options)
    with init_empty_weights():
        model = maker.from_config(config, trust_remote_code=False, **options)
    setattr(model, model.base_model_prefix, read.base_model)
    model.tie_weights()
    return model.eval()


def read_score(name: str | Path) -> tuple[Tensor, tuple[str, ...]] | None:
    """Read the linear layer (labels, width) of a reward model, and its labels; None if there is none.

    Args:
        name: Folder or hub id of a model, or of an adapter.
    """
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig

    if objects.is_object(str(name)):
        return None
    folder = _folder(str(name))
    classifier = (folder / "config.json").is_file() and is_classifier(str(folder))
    if not classifier and not (folder / SCORE).is_file():
        return None
    for file in sorted(folder.glob("*.safetensors")) if classifier else [folder / SCORE]:
        try:
            with safe_open(file, "pt") as opened:
                if "score.weight" not in opened.keys():  # noqa: SIM118
                    continue
                labels = json.loads((opened.metadata() or {}).get(LABELS, "[]"))
                weight = opened.get_tensor("score.weight")
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(f"cannot read '{file}' of a reward model: {error}") from error
        if classifier:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            several = config.num_labels > 1
            labels = [config.id2label[number] for number in range(config.num_labels)] if several else []
        if not weight.isfinite().all() or len(weight) != max(1, len(labels)):
            raise ConfigError(f"`score.weight` in '{file}' is not finite, or not a row for each label")
        return weight, tuple(map(str, labels))
    raise ConfigError(f"no file in '{folder}' has the layer `score.weight`, which computes the scores")


def _folder(name: str) -> Path:
    """Return the folder of a model; for a hub id the local copy, with `SCORE` if the repository has it."""
    from transformers.utils import cached_file

    if (folder := Path(name).expanduser()).is_dir():
        return folder
    try:
        cached_file(name, SCORE, _raise_exceptions_for_missing_entries=False)
        return Path(str(cached_file(name, "config.json"))).parent
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the model '{name}': {error}") from error


def write_score(score: Tensor, labels: Sequence[str], folder: Path) -> None:
    """Write the linear layer (labels, width) and the labels into `SCORE`."""
    from safetensors.torch import save_file

    weights = {"score.weight": score.detach().cpu().contiguous()}
    save_file(weights, folder / SCORE, {"format": "pt", LABELS: json.dumps(list(labels))})


def save_classifier(model: Any, score: Tensor, labels: Sequence[str], pad: int, folder: Path) -> None:
    """Save a language model (not its output head) together with a score layer as a sequence classifier.

    Args:
        model: The language model.
        score: Weights (labels, width) of the linear layer.
        labels: Names of the scores; empty: one score.
        pad: Token id of padding, by which the classifier finds the last token of a text.
        folder: The folder to write to.
    """
    from accelerate import init_empty_weights

    config = copy.deepcopy(model.config)
    config.id2label = dict(enumerate(labels or ("LABEL_0",)))
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.get_text_config().pad_token_id = config.pad_token_id = pad
    config.architectures = [classifier_class(config).__name__]
    with init_empty_weights(include_buffers=False):
        shell = classifier_class(config)(config)
    setattr(shell, shell.base_model_prefix, model.base_model)
    shell.score.weight = nn.Parameter(score.detach())
    shell.save_pretrained(str(folder))


@torch.no_grad()
def load_core(model: Any, folder: Path) -> None:
    """Copy the weights of a saved sequence classifier, without its score layer, into a language model."""
    saved: Any = load_classifier(folder, dtype=widest_dtype(model, folder))
    copy_weights(model.base_model, saved.base_model)
