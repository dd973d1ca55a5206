"""Reward models made of a Qwen-VL and a regression head on special tokens: loading and scoring."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from mmrl.config.schema import Config
from mmrl.core.plain_text import PlainText
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion import reward_base as base
from mmrl.diffusion.image_io import to_pil
from mmrl.rewards.frames import mean_over_frames
from mmrl.runtime.modules import DTYPES, model_source

MODELS = ("qwen2_vl", "qwen2_5_vl")
PIXELS = 256 * 28 * 28  # per image for HPSv3 and EditReward; limit per frame for VideoAlign
# (pattern, replacement) for published weight names; covers peft, and transformers before and after 4.52.
NAMES = (
    (r"^(base_model\.model\.)?(model\.)?visual\.", "body.visual."),
    (r"^(base_model\.model\.)?model\.(language_model\.)?", "body.language_model."),
    (r"^base_model\.model\.", ""),
)
UNUSED = re.compile(r"(^|\.)lm_head\.weight$")
Dtype = Literal["bfloat16", "float16", "float32"]


@cache
def published_prompts() -> Mapping[str, str]:
    """Read the prompts in `prompts.yaml`; `{text_prompt}` stands for the prompt or the instruction."""
    return yaml.safe_load((Path(__file__).parent / "prompts.yaml").read_text("utf-8"))


def mlp_head(width: int) -> nn.Sequential:
    """Create the head of HPSv3 and EditReward, from states (..., width) to mean and log-deviation."""
    # Published layer numbers count two activations and a dropout; `Identity` replaces the dropout.
    layers = (nn.Linear(width, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(16, 2))


def renamed(reward: str, published: Mapping[str, Any], lora_scale: float = 0.0) -> dict[str, Tensor]:
    """Map the names of a checkpoint to those of `QwenScorer`, and merge a LoRA adapter into its weights.

    Args:
        reward: Name of the reward, for errors.
        published: The weights, or a mapping with the weights under the key `model`.
        lora_scale: Factor of the adapter's update, alpha over rank.
    """
    state: dict[str, Tensor] = dict(published.get("model", published))
    names: dict[str, Tensor] = {}
    for name in [name for name in state if name.endswith(".lora_A.default.weight")]:
        layer = name.removesuffix(".lora_A.default.weight")
        down, up = state.pop(name).float(), state.pop(f"{layer}.lora_B.default.weight", None)
        weight = state.get(f"{layer}.base_layer.weight")
        if up is None or weight is None:
            raise ValueError(f"{reward}: the weights have '{name}', but no base layer or `lora_B` for it")
        state[f"{layer}.base_layer.weight"] = (weight.float() + lora_scale * up.float() @ down).to(
            weight.dtype
        )
    for name, value in state.items():
        if UNUSED.search(name):
            continue
        new = name.replace(".base_layer.", ".")
        new = next((re.sub(old, ours, new) for old, ours in NAMES if re.match(old, new)), new)
        if new in names:
            raise ValueError(f"{reward}: the weights hold '{new}' twice, once as '{name}'")
        names[new] = value
    return names


def resize(image: Tensor, pixels: int) -> Any:
    """Resize an image (3, height, width) uint8 to about `pixels` pixels and sides of multiples of 28."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    height, width = smart_resize(*image.shape[1:], factor=28, min_pixels=pixels, max_pixels=pixels)
    return to_pil(image).resize((width, height))  # bicubic


def load_config(reward: str, model: str) -> tuple[Any, Any]:
    """Load configuration and processor of a base model; raises ValueError if its type is not supported."""
    from transformers import AutoConfig, AutoProcessor

    with base.explained(f"{reward}: cannot load configuration and processor of '{model}'"):
        source = model_source(model)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
    if config.model_type not in MODELS:
        raise ValueError(
            f"{reward}: '{model}' is of type '{config.model_type}'; its published weights are of "
            f"{' or '.join(MODELS)}"
        )
    return config, processor


def empty_body(config: Any, dtype: torch.dtype) -> nn.Module:
    """Create a model without a language head; its weights have shapes, but no values."""
    from accelerate import init_empty_weights
    from transformers import AutoModel

    with init_empty_weights(include_buffers=False):
        return AutoModel.from_config(config, dtype=dtype)


class Scored:
    """Base of rewards that use a `QwenScorer`; estimates their memory."""

    @staticmethod
    def model_bytes(options: Mapping[str, Any], config: Config) -> float:
        """Return the bytes of the model's weights, without the small heads."""
        body = empty_body(load_config("the reward", options["model"])[0], DTYPES[options["dtype"]])
        return float(sum(parameter.nbytes for parameter in body.parameters()))


class ScoredImages(Scored):
    """Base of image rewards; the reward of a video is the mean over `frames` frames."""

    frames: int

    @abstractmethod
    def score_images(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every image."""

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome."""
        return mean_over_frames(self.score_images, prompts, outcomes, self.frames)


class QwenScorer(nn.Module):
    """A Qwen2-VL or Qwen2.5-VL without language head, and the heads of a reward model.

    As in the released code, all tokens, even those of images, have the one-dimensional positions 0, 1, 2 ...

    Args:
        reward: Name of the reward, for errors.
        model: Folder or hub id of the base model; only its configuration and processor are read.
        state: Weights with the names that `renamed` gives them.
        tokens: Special tokens that are added to the tokenizer, and whose hidden states the heads read.
        heads: Function of the hidden size that creates the heads, keyed by their published names.
        dtype: Precision of the body.
        head_dtype: Precision of the heads.
    """

    rm_head: Any  # the published name of a single head; several are `rm_heads`
    rm_heads: Any
    token_ids: Tensor  # (T,) ids of the special tokens

    def __init__(
        self,
        reward: str,
        model: str,
        state: Mapping[str, Tensor],
        tokens: Sequence[str],
        heads: Callable[[int], Mapping[str, nn.Module]],
        dtype: torch.dtype,
        head_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        config, processor = load_config(reward, model)
        tokenizer = processor.tokenizer
        tokenizer.add_tokens(list(tokens), special_tokens=True)
        tokenizer.padding_side = "right"
        text = config.get_text_config()
        text.vocab_size = len(tokenizer)
        self.body: Any = empty_body(config, dtype)
        with torch.device("meta"):
            made = heads(text.hidden_size)
        for name, head in made.items():
            self.add_module(name, head)
        with base.explained(f"{reward}: these are not its published weights on '{model}'"):
            self.load_state_dict(state, assign=True)
        # As in the released code, convert the whole body, which also rounds rotary frequencies.
        self.body.to(dtype)
        for name in made:
            self.get_submodule(name).to(head_dtype)
        self.processor, self.plain, self.num_tokens = processor, PlainText(tokenizer), len(tokens)
        self.register_buffer("token_ids", torch.tensor(tokenizer.convert_tokens_to_ids(list(tokens))), False)

    def texts(self, prompt: str, values: Sequence[str]) -> list[str]:
        """Fill a published prompt with each text, with control tokens marked to be read as plain text."""
        return [published_prompts()[prompt].replace("{text_prompt}", self.plain.marked(v)) for v in values]

    def encode(self, texts: Sequence[str], kind: str, media: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """Encode conversations of one user turn: media of one kind, already resized, then the text."""
        written = []
        for text, shown in zip(texts, media, strict=True):
            content = [*({"type": kind} for _ in shown), {"type": "text", "text": text}]
            chat = [{"role": "user", "content": content}]
            rendered = self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            written.append(self.plain.settled(rendered))
        given = {f"{kind}s": [medium for shown in media for medium in shown]}
        still = {"do_resize": False}
        inputs = self.plain.processor(self.processor)(
            text=written,
            **given,
            padding=True,
            return_tensors="pt",
            images_kwargs=still,
            videos_kwargs={**still, "do_sample_frames": False},
        )
        tensors = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
        return {name: inputs[name] for name in (*tensors, *VIDEO) if name in inputs}

    @torch.no_grad()
    def forward(
        self, texts: Sequence[str], kind: str, media: Sequence[Sequence[Any]], batch_size: int
    ) -> Tensor:
        """Return hidden states (B, T, D) of the T special tokens in B conversations; see `encode`."""
        rows = []
        for at in range(0, len(texts), batch_size):
            batch = slice(at, at + batch_size)
            inputs = {
                k: v.to(self.body.device) for k, v in self.encode(texts[batch], kind, media[batch]).items()
            }
            positions = (inputs["attention_mask"].cumsum(-1) - 1).expand(3, -1, -1)
            states = self.body(**inputs, position_ids=positions, use_cache=False).last_hidden_state
            found = torch.isin(inputs["input_ids"], self.token_ids)
            rows.append(states[found].view(len(states), self.num_tokens, -1))
        width = self.body.config.get_text_config().hidden_size
        return torch.cat(rows) if rows else torch.zeros(0, self.num_tokens, width, device=self.body.device)


VIDEO = ("pixel_values_videos", "video_grid_thw")


def load_scorer(
    reward: str,
    weights: str,
    model: str,
    dtype: Dtype,
    device: str,
    tokens: Sequence[str],
    heads: Callable[[int], Mapping[str, nn.Module]],
) -> QwenScorer:
    """Load a `QwenScorer` with heads in float32, or return the same one that another reward loaded."""

    def load() -> QwenScorer:
        state = renamed(reward, base.read_weights(reward, weights))
        return QwenScorer(reward, model, state, tokens, heads, DTYPES[dtype], torch.float32)

    loaded = base.shared_model(reward, device, load, weights, model, dtype)
    assert isinstance(loaded, QwenScorer)
    return loaded
