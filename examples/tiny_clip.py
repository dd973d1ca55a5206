"""Builder of a small CLIP for two demos: trained on captioned images, stored in the format of open_clip."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, normalize, one_hot, pad

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream, seeded
from mmrl.data.media import locate
from mmrl.data.text_files import CAPTION, objects, text_of
from mmrl.diffusion.image_io import load_image

LOG_INTERVAL = 50  # updates between two lines of progress
VOCABULARY = 49408  # of open_clip's own tokenizer, whose vocabulary comes with the package


@dataclass(frozen=True)
class CaptionedImages:
    """Images (M, 3, side, side) uint8, the distinct captions, and the index of each image's caption (M,)."""

    images: Tensor
    captions: tuple[str, ...]
    which: Tensor

    @staticmethod
    def read(path: Path, root: Path, side: int, captions: tuple[str, ...] = ()) -> CaptionedImages:
        """Read rows with a `prompt` and an `image`; with `captions`, no others may occur."""
        rows = objects(path, lambda row: (text_of(row, CAPTION), text_of(row, ("image",))))
        known = captions or tuple(sorted({text for text, _ in rows}))
        index = {text: i for i, text in enumerate(known)}
        unknown = [text for text, _ in rows if text not in index]
        if unknown:
            raise ValueError(f"'{path}' holds captions that were not trained on: {unknown[:3]}")
        images = torch.stack([load_image(locate(name, root), side, side) for _, name in rows])
        return CaptionedImages(images, known, torch.tensor([index[text] for text, _ in rows]))


@builder(packages={"open_clip": "clip"})
@dataclass(kw_only=True)
class TinyClip:
    """Train a small CLIP on captioned images, as a folder that open_clip reads (`local-dir:`).

    Images of one caption are all correct for it. They are shifted, mirrored, blurred and made a little noisy
    at random. Token embeddings keep their random values. Reports the share of test images whose own caption
    is the nearest of all.

    Args:
        train: File of rows with a `prompt` and an `image`.
        test: The same for measuring; its captions must occur in `train`.
        root: Folder of the images.
        side: Of the images as the model sees them, pixels.
        width: Channels of the first convolution of the ResNet.
        text_width: Width of the text transformer.
        text_length: Its context length, tokens.
        embed_dim: Dimensions of the common space.
        steps: Updates.
        batch_size: Images of an update.
        learning_rate: Peak, after 50 steps of warm-up; it falls linearly to a fiftieth.
    """

    stream: Stream
    train: str
    test: str
    root: str
    side: PositiveInt = 32
    width: PositiveInt = 16
    text_width: PositiveInt = 64
    text_length: PositiveInt = 16
    embed_dim: PositiveInt = 64
    steps: PositiveInt = 600
    batch_size: PositiveInt = 128
    learning_rate: PositiveFloat = 2e-3

    def build(self, output: Path) -> dict[str, Any]:
        """Train, write the folder, and report the accuracy on train and test images."""
        try:
            from open_clip import CLIP, SimpleTokenizer
        except ImportError as error:
            raise ImportError("builder 'tiny_clip' needs open_clip: pip install 'mmrl[clip]'") from error
        from safetensors.torch import save_file

        train = CaptionedImages.read(Path(self.train), Path(self.root), self.side)
        test = CaptionedImages.read(Path(self.test), Path(self.root), self.side, train.captions)
        tokens = SimpleTokenizer(context_length=self.text_length)(list(train.captions))
        config = self.config()
        with seeded(self.stream.seed_of("tiny_clip")):
            model = CLIP(**config["model_cfg"])
        self.fit(model, train, tokens)
        output.mkdir(parents=True, exist_ok=True)
        (output / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")
        state = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(state, output / "open_clip_model.safetensors")
        return {
            "captions": len(train.captions),
            "train_accuracy": round(accuracy(model, train, tokens), 4),
            "test_accuracy": round(accuracy(model, test, tokens), 4),
        }

    def config(self) -> dict[str, Any]:
        """Name the model and its preprocessing as open_clip's configuration does."""
        half = [0.5, 0.5, 0.5]
        vision = {"image_size": self.side, "layers": [1, 1, 1, 1], "width": self.width, "head_width": 32}
        text = {"context_length": self.text_length, "vocab_size": VOCABULARY, "width": self.text_width}
        text |= {"heads": 4, "layers": 2}
        model = {"embed_dim": self.embed_dim, "vision_cfg": vision, "text_cfg": text}
        preprocess = {"mean": half, "std": half, "interpolation": "bicubic", "resize_mode": "shortest"}
        return {"model_cfg": model, "preprocess_cfg": preprocess}

    def fit(self, model: nn.Module, data: CaptionedImages, tokens: Tensor) -> None:
        """Train a model on images and the tokens (captions, length) of their captions."""
        model.token_embedding.requires_grad_(False)  # 49408 rows, of which few captions use any
        learned = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=self.learning_rate, weight_decay=0.02, betas=(0.9, 0.98))
        model.train()
        began = time.monotonic()
        for step in range(self.steps):
            generator = self.stream.fixed("tiny_clip", step)
            rate = self.learning_rate * min(1, (step + 1) / 50)  # warm-up
            optimizer.param_groups[0]["lr"] = rate * (0.02 + 0.98 * (1 - step / self.steps))
            rows = torch.randint(len(data.which), (self.batch_size,), generator=generator)
            images = augmented(data.images[rows].float() / 127.5 - 1, generator)
            loss = contrastive_loss(model, images, tokens, data.which[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(max=math.log(100))  # as CLIP does, arXiv 2103.00020
            if (step + 1) % LOG_INTERVAL == 0 or step + 1 == self.steps:
                left = (time.monotonic() - began) / (step + 1) * (self.steps - step - 1)
                progress = f"{step + 1}/{self.steps}  loss {float(loss.detach()):.3f}  eta {left:.0f} s"
                print(f"contrastive model {progress}", flush=True)
        model.eval()


def contrastive_loss(model: nn.Module, images: Tensor, tokens: Tensor, which: Tensor) -> Tensor:
    """Average the cross-entropy of captions given images and of images given captions.

    `images` (B, 3, side, side), `tokens` (captions, length), `which` (B,). Every caption occurs once, and all
    images of a caption are correct for it, with equal probability.
    """
    present, own = torch.unique(which, return_inverse=True)
    encoded = normalize(model.encode_image(images), dim=-1)
    texts = normalize(model.encode_text(tokens[present]), dim=-1)
    logits = model.logit_scale.exp() * encoded @ texts.T  # (B, captions)
    targets = one_hot(own, len(present)).float()
    targets = targets / targets.sum(0)  # (B, captions): a distribution over images for every caption
    per_caption = -(targets * logits.log_softmax(0)).sum(0).mean()
    return 0.5 * (cross_entropy(logits, own) + per_caption)


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift images (B, 3, side, side) by up to two pixels, mirror half, blur half, and add a little noise."""
    side = images.shape[-1]
    padded = pad(images, (2, 2, 2, 2), mode="replicate")  # the background goes on
    top, left = torch.randint(0, 5, (2,), generator=generator).tolist()
    images = padded[..., top : top + side, left : left + side]
    chance = torch.rand(3, len(images), 1, 1, 1, generator=generator)  # of mirror, blur, and noise
    images = torch.where(chance[0] < 0.5, images.flip(-1), images)
    blurred = avg_pool2d(pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    images = torch.where(chance[1] < 0.5, blurred, images)
    return images + 0.05 * chance[2] * torch.randn(images.shape, generator=generator)


@torch.no_grad()
def accuracy(model: nn.Module, data: CaptionedImages, tokens: Tensor) -> float:
    """Compute the share of images whose own caption is the nearest of all."""
    texts = normalize(model.encode_text(tokens), dim=-1)
    nearest = [
        (model.encode_image(part.float() / 127.5 - 1) @ texts.T).argmax(-1) for part in data.images.split(256)
    ]
    return float((torch.cat(nearest) == data.which).double().mean())
