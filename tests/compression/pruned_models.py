"""Tiny models, prompts, and a plain simulation of pruning that the fast path is compared with."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from mmrl.core.rng import seeded
from mmrl.core.types import Outcome
from mmrl.vision.policies.tokens import Tokens
from tests.vision import tiny

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl", "internvl", "smolvlm", "llava_onevision")


@cache
def folder(family: str) -> Path:
    """Make a checkpoint once; it lives as long as the tests."""
    directory = TemporaryDirectory()
    _DIRECTORIES.append(directory)
    return tiny.make(family, Path(directory.name))


_DIRECTORIES: list[TemporaryDirectory] = []


@cache
def policy(family: str) -> Tokens:
    """Load a policy in float64; nobody changes its weights."""
    return Tokens(model=str(folder(family)), dtype="float64")


def prompts(family: str):
    """Prompts of different lengths: one image, none, two, and a video if the family reads videos."""
    out = [
        tiny.ask("one", "look ", tiny.picture(seed=1), " what is it"),
        tiny.ask("none", "only words here"),
        tiny.ask("two", "quite a bit longer ", tiny.picture(seed=2), " and ", tiny.picture(seed=3), " end"),
    ]
    return out + ([tiny.ask("clip", "see ", tiny.clip(4), " well")] if family in tiny.WITH_VIDEO else [])


def steps(speaker, asked, answers=("one two", "three four five")):
    """Rows of recorded answers, as a policy reads them."""
    rows = [speaker.encode(prompt, Outcome(text=text)) for prompt in asked for text in answers]
    return speaker.collate(tuple(rows))


def inside(table) -> torch.Tensor:
    """Mark the steps that are not padding."""
    return torch.arange(table.steps.longest)[None] < table.steps.length[:, None]


def llava_inputs(model, *, rows: int = 2, seed: int = 0, after: int = 6):
    """Inputs of a tiny LLaVA: 2 by 2 patches at different places, the second row padded on the left."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, 200, (rows, 10 + after), generator=gen)
    mask = torch.ones_like(ids)
    for row in range(rows):
        at = 2 + 2 * row
        ids[row, at : at + 4] = model.config.image_token_id
        mask[row, : row and 2] = 0
    pixels = torch.randn(rows, 3, 28, 28, generator=gen, dtype=torch.float64)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels.to(next(model.parameters()).dtype),
    }


def llava(**changes):
    """Make a LLaVA in float64 with random weights, `side` by `side` patches."""
    side = changes.pop("side", 2)
    dtype = changes.pop("dtype", torch.float64)
    text = {**tiny.TEXT, "vocab_size": 256, "num_hidden_layers": 3, **changes}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**{**tiny.TOWER, "image_size": 14 * side}),
        text_config=transformers.LlamaConfig(**text),
        image_token_id=250,
        vision_feature_layer=-1,
    )
    with seeded(0):
        model = transformers.LlavaForConditionalGeneration(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model.to(dtype).eval()


def simulate(
    model, inputs, *, radius=None, causal=True, heads=None, ffn_units=None, after=None, frozen=(), side=2
):
    """Compute the logits of a LLaVA with everything in full and masks over it: no row ever leaves.

    Patch grids of `side` by `side` are the runs of placeholders.
    """
    core = model.model
    ids, known = inputs["input_ids"], inputs["attention_mask"].bool()
    x = core.get_input_embeddings()(ids)
    visual = ids == model.config.image_token_id
    image = torch.cat(
        core.get_image_features(
            inputs["pixel_values"], vision_feature_layer=-1, vision_feature_select_strategy="default"
        ).pooler_output
    )
    x = x.masked_scatter(visual[..., None], image.to(x.dtype))
    batch, size = ids.shape
    place = torch.full((batch, size, 3), -9)
    for number, (row, column) in enumerate(visual.nonzero().tolist()):
        frame, cell = divmod(number, side * side)
        place[row, column] = torch.tensor([frame, cell // side, cell % side])
    positions = torch.arange(size)[None].expand(batch, -1)
    cos, sin = core.language_model.rotary_emb(x, positions)
    earlier = torch.ones(size, size).tril().bool()[None] & known[:, None]
    both = visual[:, :, None] & visual[:, None]
    allowed = earlier
    if radius is not None:
        apart = (place[:, :, None] - place[:, None]).abs()
        near = (apart[..., 0] == 0) & (apart[..., 1:] <= radius).all(-1)
        allowed = torch.where(both, near & earlier if causal else near, earlier)
    for i, block in enumerate(core.language_model.layers):
        late = after is not None and i >= after
        kept = torch.tensor(
            [heads is None or h in heads[i] for h in range(block.self_attn.config.num_attention_heads)]
        )
        sees = allowed[:, None] & (kept[:, None, None] | ~visual[:, None, None])
        if late:
            sees = sees & (~visual[:, None, None] | visual[:, None, :, None])
        attended = _attention(block.self_attn, block.input_layernorm(x), cos, sin, sees, kept, visual)
        still = visual[..., None] & (late or i in frozen)
        x = torch.where(still, x, x + attended)
        y = block.post_attention_layernorm(x)
        inner = block.mlp.act_fn(block.mlp.gate_proj(y)) * block.mlp.up_proj(y)
        if ffn_units is not None:
            keep = torch.zeros(inner.shape[-1])
            keep[list(ffn_units[i])] = 1
            inner = torch.where(visual[..., None], inner * keep, inner)
        x = torch.where(still, x, x + block.mlp.down_proj(inner))
    return model.lm_head(core.language_model.norm(x))


def _attention(attn, x, cos, sin, sees, kept, visual):
    q, k, v = (
        p(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
        for p in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    half = attn.head_dim // 2
    turn = lambda y: y * cos[:, None] + torch.cat((-y[..., half:], y[..., :half]), -1) * sin[:, None]
    group = q.shape[1] // k.shape[1]
    k, v = turn(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (turn(q) @ k.transpose(-1, -2)) / math.sqrt(attn.head_dim)
    sees = sees | ~sees.any(-1, keepdim=True)
    out = scores.masked_fill(~sees, float("-inf")).softmax(-1) @ v
    out = torch.where(visual[:, None, :, None] & ~kept[:, None, None], torch.zeros_like(out), out)
    return attn.o_proj(out.transpose(1, 2).flatten(2))
