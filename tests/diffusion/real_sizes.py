"""Configurations of published pipelines, without weights, and the table of the cards that train them.

`python -m tests.diffusion.real_sizes` prints the table of docs/howto/memory.md.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.diagnostics.memory_estimates import peak, smallest_card, training
from mmrl.diffusion.frozen_parts import set_vae_options
from mmrl.diffusion.memory_estimates import conditioning_of, decoding_bytes, learning_bytes, sampling_bytes
from mmrl.diffusion.model_family import Request
from mmrl.runtime.modules import loading_onto
from tests.diffusion import tiny, tiny_flux2

CLIP_L = {
    "model_type": "clip_text_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 49408, "max_position_embeddings": 77,
    "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513,
}  # fmt: skip
T5_XXL = {
    "model_type": "t5", "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
UMT5_XXL = {**T5_XXL, "model_type": "umt5", "vocab_size": 256384}
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN25_VL_7B = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"model_type": "qwen2_5_vl", "out_hidden_size": 3584, "hidden_size": 1280, "depth": 32},
}  # fmt: skip
WAN = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824}
IMAGE_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 16,
    "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
    "sample_size": 1024,
}  # fmt: skip
WAN_VAE_5B = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
    "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}  # fmt: skip


LAYERS = re.compile(r'("num_layers": |"num_hidden_layers": |"depth": )\d+')


@dataclass(frozen=True)
class Published:
    """A pipeline: networks as (library, class, configuration), tokenizers, and billions of weights."""

    pipeline: str
    networks: Mapping[str, tuple[str, str, Mapping[str, Any]]]
    tokenizers: Mapping[str, Callable[[], Any]]
    billions: float  # of `transformer`, as published
    blocks: Mapping[str, int]  # numbers of blocks of the networks
    size: tuple[int, int, int]  # frames, height, width
    settings: Mapping[str, Any] = field(default_factory=dict)
    shift: Mapping[str, Any] = field(default_factory=lambda: {"shift": 3.0})

    def write(self, folder: Path, blocks: Mapping[str, int], layers: int = 0) -> None:
        """Write the folder with other numbers of `blocks`, and of `layers` in text encoders (0: as many)."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        index: dict[str, Any] = {"_class_name": self.pipeline, **self.settings}
        for part, (library, kind, config) in self.networks.items():
            index[part] = [library, kind]
            (folder / part).mkdir(parents=True)
            full = {"_class_name": kind, **config}
            if part.startswith("transformer"):
                full |= blocks
            elif layers and part != "vae":
                full = json.loads(LAYERS.sub(rf"\g<1>{layers}", json.dumps(full)))
            (folder / part / "config.json").write_text(json.dumps(full))
        for part, make in self.tokenizers.items():
            tokenizer = make()
            tokenizer.save_pretrained(folder / part)
            index[part] = ["transformers", type(tokenizer).__name__]
        FlowMatchEulerDiscreteScheduler(**self.shift).save_pretrained(folder / "scheduler")
        index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
        (folder / "model_index.json").write_text(json.dumps(index))


def wan(vae: Mapping[str, Any], billions: float, num_layers: int, **networks: Any) -> Published:
    """Describe a Wan pipeline."""
    return Published(
        "WanPipeline",
        {
            "text_encoder": ("transformers", "UMT5EncoderModel", UMT5_XXL),
            "vae": ("diffusers", "AutoencoderKLWan", vae),
            **{name: ("diffusers", "WanTransformer3DModel", config) for name, config in networks.items()},
        },
        {"tokenizer": tiny.t5_tokenizer},
        billions,
        {"num_layers": num_layers},
        (49, 480, 832),
        {"boundary_ratio": 0.875} if len(networks) > 1 else {"transformer_2": [None, None]},
    )


IMAGE = (1, 1024, 1024)
PUBLISHED = {
    "FLUX.1-dev": Published(
        "FluxPipeline",
        {
            "text_encoder": ("transformers", "CLIPTextModel", CLIP_L),
            "text_encoder_2": ("transformers", "T5EncoderModel", T5_XXL),
            "transformer": ("diffusers", "FluxTransformer2DModel", {"guidance_embeds": True}),
            "vae": ("diffusers", "AutoencoderKL", IMAGE_VAE),
        },
        {"tokenizer": tiny.clip_tokenizer, "tokenizer_2": tiny.t5_tokenizer},
        11.9,
        {"num_layers": 19, "num_single_layers": 38},
        IMAGE,
        {"image_encoder": [None, None], "feature_extractor": [None, None]},
        {"shift": 3.0, "use_dynamic_shifting": True},
    ),
    "FLUX.2-klein-base-4B": Published(
        "Flux2KleinPipeline",
        {
            "text_encoder": ("transformers", "Qwen3ForCausalLM", QWEN3_4B),
            "transformer": (
                "diffusers",
                "Flux2Transformer2DModel",
                {
                    "num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False,
                },
            ),
            "vae": ("diffusers", "AutoencoderKLFlux2", {}),
        },
        {"tokenizer": tiny_flux2.qwen3_tokenizer},
        3.9,
        {"num_layers": 5, "num_single_layers": 20},
        IMAGE,
        {"is_distilled": False},
        {"shift": 3.0, "use_dynamic_shifting": True},
    ),
    "Qwen-Image": Published(
        "QwenImagePipeline",
        {
            "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration", QWEN25_VL_7B),
            "transformer": ("diffusers", "QwenImageTransformer2DModel", {}),
            "vae": ("diffusers", "AutoencoderKLQwenImage", {}),
        },
        {"tokenizer": tiny.qwen_tokenizer},
        20.4,
        {"num_layers": 60},
        IMAGE,
        {},
        {
            "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192,
            "shift_terminal": 0.02,
        },
    ),
    "Wan2.2-TI2V-5B": wan(
        WAN_VAE_5B,
        5.0,
        30,
        transformer={
            "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48,
            "out_channels": 48,
        },
    ),
    "Wan2.2-T2V-A14B": wan({}, 14.3, 40, transformer=WAN, transformer_2=WAN),
}  # fmt: skip
LORA = {"lora_rank": 16}
AWAY = {
    **LORA, "gradient_checkpointing": True, "offload": ["text_encoders", "vae"], "vae_tiling": True
}  # fmt: skip
BITS = [{"transform": [{"name": "compression.bnb_quantize", "nbits": nbits}]} for nbits in (8, 4)]
OPTIONS: dict[str, Mapping[str, Any]] = {
    "LoRA": LORA,
    "checkpointing, offload, tiling": AWAY,
    "and 8 bits": AWAY | BITS[0],
    "and 4 bits": AWAY | BITS[1],
}
STORED = "and encoded prompts"  # the last options, when all prompts are encoded on disk


def config_of(folder: Path, size: tuple[int, int, int], **options: Any) -> Config:
    """Make a run that samples and learns one row at a time, without guidance."""
    frames, height, width = size
    engine = {
        "name": "diffusion.denoise", "height": height, "width": width, "num_frames": frames,
        "guidance_scale": 1.0, "batch_size": 1,
    }  # fmt: skip
    return parse(
        {
            "policy": {"name": "diffusion.flow", "model": str(folder), **options},
            "data": "tests.diffusion.flows:data",
            "rollout": {"engine": [engine], "num_prompts": 8, "num_generations": 8},
            "rewards": ["tests.support.real_worker:longer"],
            "advantage": ["total", "group_normalize"],
            "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
            "learn": {"micro_batch_steps": 1, "optimizer": "adamw"},
            "output_dir": "nowhere",
        },
        Config,
    )


class Estimates:
    """Estimates of a pipeline from networks of one and two blocks of each kind, which are faster to run."""

    def __init__(self, published: Published, folder: Path, *, measure: bool = True) -> None:
        self.published, self.folder = published, folder
        if measure:
            self._measure()

    def _measure(self) -> None:
        """Measure what does not depend on the options of the network."""
        published = self.published
        whole = self.policy(dict.fromkeys(published.blocks, 1), {})
        size = published.size
        self.shape = whole.family.latent_shape(whole.pipe, *size[1:], size[0])
        self.conditioning = conditioning_of(whole, Request("a cat on a boat", (), size), 1.0)
        self.text, self.vae = whole.frozen.nbytes("text_encoders"), whole.frozen.nbytes("vae")
        self.decoding = {}  # by `vae_tiling`
        for tiled in (False, True):
            set_vae_options(whole.pipe.vae, tiled, slicing=False)
            self.decoding[tiled] = decoding_bytes(whole, self.conditioning, self.shape, 1)

    def component_sizes(self, options: Mapping[str, Any]) -> dict[str, float]:
        """Estimate the memory of a run by component."""
        blocks = self.published.blocks
        few = dict.fromkeys(blocks, 1)
        base = self._of_few(few, options)
        sizes = dict(base)
        for name, number in blocks.items():
            for part, size in self._of_few(few | {name: 2}, options).items():
                sizes[part] += (number - 1) * (size - base[part])
        sizes["decoding/pixels"] = self.decoding[bool(options.get("vae_tiling"))]
        if options.get("offload"):
            return sizes | {"encoding/text encoders": self.text, "decoding/autoencoder": self.vae}
        return sizes | {"encoders and decoder": self.text + self.vae}

    def policy(self, blocks: Mapping[str, int], options: Mapping[str, Any], layers: int = 0) -> Any:
        """Make a policy without weights, with `layers` in the text encoders (0: all)."""
        folder = self.folder / "-".join(map(str, (layers, *blocks.values())))
        if not folder.exists():
            self.published.write(folder, blocks, layers)
        with loading_onto(None, empty=True):
            return Pieces(Stream()).make("policy", config_of(folder, self.published.size, **options).policy)

    def _of_few(self, blocks: Mapping[str, int], options: Mapping[str, Any]) -> dict[str, float]:
        """Estimate the parts that depend on the network, with few blocks."""
        policy = self.policy(blocks, options, layers=1)
        given = policy, self.conditioning, self.shape, 1
        return {
            **training(config_of(self.folder, self.published.size), policy, []),
            "rollouts/passes": sampling_bytes(*given),
            "learning/activations": learning_bytes(*given),
        }


def cells(name: str, columns: Sequence[str] = tuple(OPTIONS)) -> dict[str, str]:
    """Make some cells of a pipeline's row, and with the last options that of stored prompts.

    A cell is the peak in GiB, and the smallest card that has it.
    """
    cell = lambda size: f"{size / 2**30:.0f} ({smallest_card(size) or 'none'})"
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        estimates = Estimates(PUBLISHED[name], Path(folder))
        for column in columns:
            sizes = estimates.component_sizes(OPTIONS[column])
            print(name, time.process_time(), file=sys.stderr)
            print({part: round(size / 2**30, 2) for part, size in sizes.items()}, file=sys.stderr)
            made[column] = cell(peak(sizes))
            if column == [*OPTIONS][-1]:
                stored = {part: size for part, size in sizes.items() if part != "encoding/text encoders"}
                made[STORED] = cell(peak(stored))
    return made


def table(*names: str) -> Iterator[str]:
    """Make the rows of some or all pipelines."""
    head = ["model", *OPTIONS, STORED]
    yield from (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head)))
    for name in names or PUBLISHED:
        yield f"| {' | '.join((name, *cells(name).values()))} |"


if __name__ == "__main__":
    for line in table(*sys.argv[1:]):
        print(line, flush=True)
