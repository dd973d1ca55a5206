"""Text2Layer (arXiv 2307.09781): images of a foreground, a background and a mask, made together.

Title: Text2Layer: Layered Image Generation using Latent Diffusion Model
Formula: C = m F + (1 - m) B; reward = IoU of m > 1/2 and the salient object of C.
Our reading: a layered image is 7 channels (F, B, m) for one autoencoder; its losses; the flow instead of
diffusion; the segmentation of small images by their contrast with the border.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import builder, data, engine, import_name
from mmrl.core.protocols import Engine
from mmrl.core.rng import seeded
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.data.fields import RowError
from mmrl.data.row_files import DataRow
from mmrl.data.text_files import CAPTION, RecordedAnswers
from mmrl.diffusion.builders.tiny_flow_model import TinyFlowModel
from mmrl.diffusion.datasets.edits import MASKS, ConditionedRows
from mmrl.diffusion.image_io import image_size, load_image

CHANNELS = 7  # foreground, background, mask
ROLES = {"foreground": ("foreground",), "background": ("background",), "mask": MASKS, "caption": CAPTION}


def compose(layers: Tensor) -> Tensor:
    """Compose a layered image (7, height, width) uint8 to (3, height, width) uint8, rounded once."""
    foreground, background, mask = layers.double().split((3, 3, 1))
    return (mask / 255 * foreground + (1 - mask / 255) * background).round().to(torch.uint8)


def border_contrast(image: Tensor) -> Tensor:
    """Segment an object on a plain background: pixels (height, width) far from the colour of the border.

    Far is more than half of the largest distance; an image of one colour has no object (our reading).
    """
    pixels = image.double()
    border = torch.cat([pixels[:, [0, -1]].flatten(1), pixels[:, :, [0, -1]].flatten(1)], 1)
    distance = (pixels - border.median(1).values[:, None, None]).norm(dim=0)
    return (distance > distance.max() / 2) & (distance > 8)  # 8 of 255: noise of the decoder


def mask_iou(mask: Tensor, other: Tensor) -> float:
    """Compute the IoU of two bool masks; 1 if both are empty."""
    union = int((mask | other).sum())
    return int((mask & other).sum()) / union if union else 1.0


@engine(scope="diffusion", sets_tags={"layer"})
class WithLayers:
    """Split layered images into foreground, background, mask and composite (Text2Layer).

    arXiv 2307.09781. A rollout gets four outcomes with the same end and the tag `layer`; the composite is the
    last. It records `mask_iou`, the IoU of the mask and the object that `segment` finds in the composite, and
    `mask_share`, the fraction of the image inside the mask; `{name: precomputed, key: mask_iou}` reads them.
    Other rewards choose a layer: `at: layer=background`. The chain needs `mean_by_end` after `total`.

    Args:
        engine: Makes images of 7 channels: a pipeline with a layered autoencoder, or recorded answers.
        segment: Segmentation as `package.module:function`, from (3, height, width) uint8 to a bool mask
            (height, width); empty: pixels that differ from the colour of the border.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine, *, segment: str = "") -> None:
        self.engine, self.policy = engine, engine.policy
        try:
            self.segment: Callable[[Tensor], Tensor] = import_name(segment) if segment else border_contrast
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"`segment` must read package.module:function, not '{segment}': {error}"
            ) from error

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Run the wrapped engine, and split its images."""
        return tuple(replace(row, outcomes=self._layers(row)) for row in self.engine.rollout(prompts))

    def _layers(self, row: Trajectory) -> tuple[Outcome, ...]:
        made = row.outcomes[-1]
        if made.image is None or len(made.image) != CHANNELS:
            shape = None if made.image is None else tuple(made.image.shape)
            raise ConfigError(
                f"`diffusion.with_layers` splits images of {CHANNELS} channels, which a layered autoencoder "
                f"makes (`mmrl build` with diffusion.tiny_layered_flow_model); got {shape}"
            )
        foreground, background, mask = made.image.split((3, 3, 1))
        composite, inside = compose(made.image), mask[0] > 127
        recorded = {
            **made.recorded,
            "mask_iou": mask_iou(inside, self.segment(composite)),
            "mask_share": float(inside.double().mean()),
        }
        images = {"foreground": foreground, "background": background, "mask": mask.expand(3, -1, -1)}
        layers = [
            replace(made, image=image, tags={**made.tags, "layer": name}, recorded={})
            for name, image in images.items()
        ]
        tags = {**made.tags, "layer": "composite"}
        return (*layers, replace(made, image=composite, tags=tags, recorded=recorded))


@data(scope="diffusion")
def layered_images(
    *,
    path: str,
    root: str = "",
    columns: Mapping[str, str] | None = None,
    height: NonNegativeInt = 0,
    width: NonNegativeInt = 0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read captions with a layered image each, which is the recorded answer: 7 channels (Text2Layer).

    A row has `foreground`, `background` and `mask` (white inside), files of one size, and a `caption`.

    Args:
        path: The file or folder of rows.
        root: Folder of the images; by default the folder of the rows.
        columns: Maps `foreground`, `background`, `mask` and `caption` to the columns of the file.
        height: Height in pixels to which images are cropped and resized.
        width: Width in pixels; 0 for both keeps the images' own sizes.
        bad_rows: Unusable rows raise (`error`) or are skipped and logged (`drop`).
        limit: Maximum number of rows to read; 0: all.
    """
    if bool(height) != bool(width):
        raise ConfigError(f"give both height and width, or neither; got {height} and {width}")
    rows = ConditionedRows(Path(path), root, ROLES, columns or {}, "engine")

    def load(files: tuple[Any, ...]) -> Outcome:
        foreground, background, mask = (load_image(_read(file), height, width) for file in files)
        return Outcome(image=torch.cat([foreground, background, mask[:1]]))

    def make(row: DataRow, number: int) -> Prompt:
        chosen = rows.choose(row)
        layers = {role: rows.media(row, chosen[role]) for role in ("foreground", "background", "mask")}
        for role, images in layers.items():
            if len(images) != 1:
                raise rows.wanted(role)
        files = tuple(images[0].source for images in layers.values())
        sizes = [image_size(_read(file)) for file in files]
        if len({*sizes}) > 1:
            raise RowError(f"the layers must have one size, not {', '.join(f'{h} x {w}' for h, w in sizes)}")
        size = (height, width) if height else sizes[0]
        answers = RecordedAnswers((files,), ({"score": 1.0},), load, lambda files: (1, *size))
        return rows.prompt(row, number, [], chosen, answers, {})

    return rows.read(make, bad_rows, limit)


def _read(source: Any) -> Path | bytes:
    return source if isinstance(source, Path | bytes) else source.read()


@builder(packages={"diffusers": "diffusion"}, scope="diffusion")
@dataclass(kw_only=True)
class TinyLayeredFlowModel(TinyFlowModel):
    """Build a small SD3 pipeline with a trained autoencoder of layered images (Text2Layer).

    The autoencoder maps 7 channels to one latent at half of the side; the transformer, whose weights are
    random, makes such latents. The loss is the absolute error of the foreground inside the mask, of the
    background, of the mask and of the composite, and a small KL term (our reading of arXiv 2307.09781).

    Args:
        texts: Rows as `diffusion.layered_images` reads them in JSON lines; their captions are the words.
        latent_channels: Channels of the latent.
        autoencoder_steps: Optimizer steps of the autoencoder, on all images at once.
        autoencoder_rate: Its learning rate.
        kl: Weight of the KL term.
        side: Height and width of the images in pixels.
        patch: Side of the transformer's patches in latent pixels.
        width: Hidden size of the transformer.
        layers: Number of layers of the transformer.
        heads: Number of attention heads of the transformer.
        text_width: Hidden size of the text encoders.
        text_length: Maximum number of tokens of a text.
        init: Scale of the text encoders' weights, as in `diffusion.tiny_flow_model`.
        shift: Shift of the denoising times towards noise; 1: none.
    """

    patch: PositiveInt = 2
    latent_channels: PositiveInt = 8
    autoencoder_steps: PositiveInt = 300
    autoencoder_rate: PositiveFloat = 3e-3
    kl: PositiveFloat = 1e-6

    def autoencoder(self) -> Any:
        """Train the autoencoder; its latents are scaled to mean 0 and standard deviation 1."""
        from diffusers import AutoencoderKL

        prompts = layered_images(path=self.texts, height=self.side, width=self.side)
        layered = [answer.image for prompt in prompts for answer in prompt.answers]
        images = torch.stack([image for image in layered if image is not None]) / 127.5 - 1  # (N, 7, h, w)
        with seeded(self.stream.seed_of("tiny_layered_flow_model")):
            vae = AutoencoderKL(
                in_channels=CHANNELS,
                out_channels=CHANNELS,
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                block_out_channels=(16, 32),
                latent_channels=self.latent_channels,
                norm_num_groups=8,
                sample_size=self.side,
            )
            optimizer = torch.optim.AdamW(vae.parameters(), lr=self.autoencoder_rate)
            for _ in range(self.autoencoder_steps):
                posterior = vae.encode(images).latent_dist
                loss = layered_loss(vae.decode(posterior.sample()).sample, images)
                optimizer.zero_grad()
                (loss + self.kl * posterior.kl().mean()).backward()
                optimizer.step()
            with torch.no_grad():
                latents = vae.encode(images).latent_dist.mode()
        vae.register_to_config(scaling_factor=1 / float(latents.std()), shift_factor=float(latents.mean()))
        return vae.eval()


def layered_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """Compute the mean absolute error of layers (N, 7, height, width) in [-1, 1] and of their composites.

    The foreground counts inside the mask only, because it is undefined outside.
    """
    mask = (wanted[:, 6:] + 1) / 2
    error = (made - wanted).abs()
    layers = (mask * error[:, :3]).mean() + error[:, 3:6].mean() + error[:, 6:].mean()
    composites = [
        share * image[:, :3] + (1 - share) * image[:, 3:6]
        for image, share in ((made, (made[:, 6:] + 1) / 2), (wanted, mask))
    ]
    return layers + (composites[0] - composites[1]).abs().mean()
