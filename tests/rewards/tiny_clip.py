"""Tiny models of open_clip with random weights, as folders and as files."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mmrl.core.rng import seeded

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
SIGLIP = {**CONFIG, "init_logit_scale": 2.302585, "init_logit_bias": -10.0, "custom_text": True}


def architecture(name: str, folder: Path, config: dict = CONFIG) -> str:
    """Tell open_clip of an architecture."""
    import open_clip

    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    open_clip.add_model_config(path)
    return name


def weights(folder: Path, name: str = "tiny-clip", config: dict = CONFIG) -> dict[str, torch.Tensor]:
    """Draw weights for an architecture."""
    import open_clip

    with seeded(0):
        return open_clip.create_model(architecture(name, folder, config)).state_dict()


def write_folder(folder: Path, config: dict = CONFIG, preprocess: dict | None = None) -> Path:
    """Write a model folder: open_clip's config JSON and safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written = {"model_cfg": config, "preprocess_cfg": preprocess or {}}
    (folder / "open_clip_config.json").write_text(json.dumps(written))
    state = weights(folder.parent, "tiny-" + folder.name, config)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "open_clip_model.safetensors")
    return folder
