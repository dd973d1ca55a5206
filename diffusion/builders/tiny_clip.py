"""A small contrastive model of pictures and captions, trained from nothing and stored as open_clip stores its
own."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.media import locate
from mmrl.data.text_files import CAPTION, objects, text_of
from mmrl.diffusion.image_io import Reading, read_picture

PAUSE = 10.0  # seconds between two lines of progress
WORDS = 49408  # of open_clip's own tokenizer, whose vocabulary comes with the package


@dataclass(frozen=True)
class Captioned:
    """Pictures (M, 3, side, side) uint8, the distinct captions, and which of them is whose: (M,)."""

    pictures: Tensor
    captions: tuple[str, ...]
    which: Tensor

    @staticmethod
    def read(path: Path, root: Path, side: int, captions: tuple[str, ...] = ()) -> Captioned:
        """Read rows with a `prompt` and an `image`; `captions` are those known already."""
        rows = objects(path, lambda row: (text_of(row, CAPTION), text_of(row, ("image",))))
        known = captions or tuple(sorted({text for text, _ in rows}))
        number = {text: i for i, text in enumerate(known)}
        strange = [text for text, _ in rows if text not in number]
        if strange:
            raise ValueError(f"'{path}' holds captions that were not trained on: {strange[:3]}")
        reading = Reading(height=side, width=side)
        pictures = torch.stack([read_picture(locate(name, root), reading) for _, name in rows])
        return Captioned(pictures, known, torch.tensor([number[text] for text, _ in rows]))


@builder(packages={"open_clip": "clip"})
class TinyClip:
    """Train a small CLIP on captioned pictures, and write it as a folder that open_clip reads (`local-dir:`).

    `train` and `test` are files of rows with a `prompt` and an `image` under `root`. Rows of one caption are
    right answers to each other. Pictures are moved, mirrored, blurred and made a little noisy at random.
    Token embeddings stay as they were drawn. Tells the share of test pictures whose own caption is the
    nearest of all.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        train: str,
        test: str,
        root: str,
        side: PositiveInt = 32,
        width: PositiveInt = 16,
        text_width: PositiveInt = 64,
        text_length: PositiveInt = 16,
        embed_dim: PositiveInt = 64,
        steps: PositiveInt = 600,
        batch_size: PositiveInt = 128,
        learning_rate: PositiveFloat = 2e-3,
    ) -> None:
        self.stream, self.root = stream, Path(root)
        self.paths = {"train": Path(train), "test": Path(test)}
        self.side, self.width, self.embed_dim = side, width, embed_dim
        self.text_width, self.text_length = text_width, text_length
        self.steps, self.batch_size, self.learning_rate = steps, batch_size, learning_rate

    def build(self, output: Path) -> dict[str, Any]:
        """Train, write the folder, and tell how good it is on test pictures."""
        try:
            from open_clip import CLIP, SimpleTokenizer
        except ImportError as error:
            raise ImportError("builder 'tiny_clip' needs open_clip: pip install 'mmrl[clip]'") from error
        from safetensors.torch import save_file

        config = self._config()
        shown = Captioned.read(self.paths["train"], self.root, self.side)
        held = Captioned.read(self.paths["test"], self.root, self.side, shown.captions)
        tokens = SimpleTokenizer(context_length=self.text_length)(list(shown.captions))
        seed = int(torch.randint(1 << 31, (1,), generator=self.stream.fixed("tiny_clip")))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = CLIP(**config["model_cfg"])
        self._train(model, shown, tokens)
        output.mkdir(parents=True, exist_ok=True)
        (output / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")
        state = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(state, output / "open_clip_model.safetensors")
        return {
            "captions": len(shown.captions),
            "train_accuracy": round(accuracy(model, shown, tokens), 4),
            "test_accuracy": round(accuracy(model, held, tokens), 4),
        }

    def _config(self) -> dict[str, Any]:
        half = [0.5, 0.5, 0.5]
        vision = {"image_size": self.side, "layers": [1, 1, 1, 1], "width": self.width, "head_width": 32}
        text = {
            "context_length": self.text_length,
            "vocab_size": WORDS,
            "width": self.text_width,
            "heads": 4,
            "layers": 2,
        }
        model = {"embed_dim": self.embed_dim, "vision_cfg": vision, "text_cfg": text}
        seen = {"mean": half, "std": half, "interpolation": "bicubic", "resize_mode": "shortest"}
        return {"model_cfg": model, "preprocess_cfg": seen}

    def _train(self, model: nn.Module, shown: Captioned, tokens: Tensor) -> None:
        model.token_embedding.requires_grad_(False)
        learned = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=self.learning_rate, weight_decay=0.02, betas=(0.9, 0.98))
        model.train()
        began, said = time.monotonic(), -math.inf
        for step in range(self.steps):
            generator = self.stream.fixed("tiny_clip", step)
            rate = self.learning_rate * min(1, (step + 1) / 50)
            optimizer.param_groups[0]["lr"] = rate * (0.02 + 0.98 * (1 - step / self.steps))
            rows = torch.randint(len(shown.which), (self.batch_size,), generator=generator)
            pictures = disturbed(shown.pictures[rows].float() / 127.5 - 1, generator)
            loss = contrast(model, pictures, tokens, shown.which[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(max=math.log(100))
            spent = time.monotonic() - began
            if spent > said + PAUSE or step + 1 == self.steps:
                said, left = spent, spent / (step + 1) * (self.steps - step - 1)
                words = f"loss {float(loss.detach()):.3f}  eta {left:.0f} s"
                print(f"contrastive model {step + 1}/{self.steps}  {words}", flush=True)
        model.eval()


def contrast(model: nn.Module, pictures: Tensor, tokens: Tensor, which: Tensor) -> Tensor:
    """Average the cross-entropy of captions given pictures and of pictures given captions.

    `pictures` (B, 3, side, side), `tokens` (captions, length), `which` (B,). Every caption is asked once, and
    all pictures of a caption are right answers to it, in equal shares.
    """
    present, own = torch.unique(which, return_inverse=True)
    images = nn.functional.normalize(model.encode_image(pictures), dim=-1)
    texts = nn.functional.normalize(model.encode_text(tokens[present]), dim=-1)
    logits = model.logit_scale.exp() * images @ texts.T
    shares = nn.functional.one_hot(own, len(present)).float()
    shares = shares / shares.sum(0)
    per_caption = -(shares * logits.log_softmax(0)).sum(0).mean()
    return 0.5 * (nn.functional.cross_entropy(logits, own) + per_caption)


def disturbed(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Move pictures (B, 3, side, side) by up to two pixels, mirror half of them, blur half of them, and add a
    little noise."""
    side = pictures.shape[-1]
    padded = nn.functional.pad(pictures, (2, 2, 2, 2), mode="replicate")
    top, left = torch.randint(0, 5, (2,), generator=generator).tolist()
    pictures = padded[..., top : top + side, left : left + side]
    chance = torch.rand(3, len(pictures), 1, 1, 1, generator=generator)
    pictures = torch.where(chance[0] < 0.5, pictures.flip(-1), pictures)
    soft = nn.functional.avg_pool2d(nn.functional.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, 1)
    pictures = torch.where(chance[1] < 0.5, soft, pictures)
    return pictures + 0.05 * chance[2] * torch.randn(pictures.shape, generator=generator)


@torch.no_grad()
def accuracy(model: nn.Module, held: Captioned, tokens: Tensor) -> float:
    """Tell the share of pictures whose own caption is the nearest of all."""
    texts = nn.functional.normalize(model.encode_text(tokens), dim=-1)
    nearest = [
        (model.encode_image(part.float() / 127.5 - 1) @ texts.T).argmax(-1)
        for part in held.pictures.split(256)
    ]
    return float((torch.cat(nearest) == held.which).double().mean())
