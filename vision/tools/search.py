"""Tools that search local texts, tables and images, without network access."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import tool
from mmrl.core.types import Media
from mmrl.data.dataset_io import valid_rows
from mmrl.data.fields import RowError, text
from mmrl.data.media_root import MediaRoot, media_refs
from mmrl.data.video import FrameSampling
from mmrl.runtime.clip_model import load_towers
from mmrl.vision.tools.replies import to_pil

K1, B = 1.2, 0.75  # BM25: saturation of repeated words, and length normalisation


@tool
def search(query: str, *, path: str, column: str = "caption", most: PositiveInt = 3) -> str:
    """Search a collection of texts, and list those that fit best.

    Args:
        query: Words that the texts should have.
        path: The file or folder of rows to search.
        column: The column with the texts; empty: all columns of a row, such as a row of a table.
        most: The most texts that are listed.
    """
    index = read_index(path, column, Path(path).stat().st_mtime_ns)
    places = index.search(query)[:most]
    return "\n".join(index.texts[place] for place in places) or "nothing was found"


@tool
def search_images(
    query: str,
    *,
    path: str,
    root: str = "",
    column: str = "caption",
    most: PositiveInt = 1,
    model: str = "",
    pretrained: str | None = None,
    device: str = "auto",
) -> Any:
    """Search a collection of images, and show those that fit best with their captions.

    Args:
        query: What the images should show.
        path: The file or folder of rows, which have an `image` and a caption.
        root: The folder of the images; by default the folder of the rows.
        column: The column with the captions.
        most: The most images that are shown.
        model: A CLIP model, as in `clip_score`, that compares the query with the images; empty: the words of
            the captions are compared (BM25).
        pretrained: Weights of an architecture of open_clip, as in `clip_score`.
        device: Torch device of the model; `auto` is the current GPU, or the CPU.
    """
    changed = Path(path).stat().st_mtime_ns
    index, images = read_index(path, column, changed), read_images(path, root, changed)
    if model:
        towers, vectors = embedded_images(path, root, changed, model, pretrained, device)
        places = (vectors @ towers.read([query])[0]).argsort(descending=True, stable=True).tolist()
    else:
        places = index.search(query)
    shown = [(to_pil(images[place]), index.texts[place]) for place in places[:most]]
    return [part for both in shown for part in both] or "nothing was found"


@dataclass(frozen=True)
class Index:
    """A BM25 index of a collection of texts."""

    texts: tuple[str, ...]
    counts: tuple[Counter[str], ...]  # word counts of each text
    having: Counter[str]  # number of texts that contain each word
    average: float  # mean number of words per text

    def search(self, query: str) -> list[int]:
        """Return the indices of texts that share a word with the query, by descending score, then index."""
        scores = [self.score(query, place) for place in range(len(self.texts))]
        return sorted((i for i, score in enumerate(scores) if score), key=lambda i: -scores[i])

    def score(self, query: str, place: int) -> float:
        """Compute the BM25 score of text number `place` (Robertson and Zaragoza 2009), with an IDF >= 0."""
        counts, score = self.counts[place], 0.0
        for word in dict.fromkeys(words_of(query)):
            if counts[word]:
                having = self.having[word]
                rarity = math.log(1 + (len(self.texts) - having + 0.5) / (having + 0.5))
                length = K1 * (1 - B + B * counts.total() / self.average)
                score += rarity * counts[word] * (K1 + 1) / (counts[word] + length)
        return score


def words_of(text: str) -> list[str]:
    """Split a text into lower-case words without punctuation."""
    return re.findall(r"[^\W_]+", text.lower())


@lru_cache(maxsize=8)
def read_index(path: str, column: str, changed: int) -> Index:
    """Read and index the texts of a column; `changed`, the file's time stamp, is part of the cache key.

    An empty `column` takes all columns of a row. Raises RowError for a row without the text, and for a file
    without rows.
    """
    rows = valid_rows(Path(path))
    texts = tuple(text(row.columns.get(column), column) if column else _whole(row.columns) for row in rows)
    if not texts:
        raise RowError(f"'{path}' has no rows to search")
    counts = tuple(Counter(words_of(each)) for each in texts)
    having = Counter(word for each in counts for word in each)
    return Index(texts, counts, having, sum(each.total() for each in counts) / len(texts))


def _whole(columns: Mapping[str, Any]) -> str:
    """Join the names and values of all columns of a row to a line of text."""
    return "; ".join(f"{name}: {value}" for name, value in columns.items() if value is not None)


@lru_cache(maxsize=8)
def read_images(path: str, root: str, changed: int) -> tuple[Media, ...]:
    """List the images of the rows of a file; raises RowError for a row without exactly one image."""
    media, images = MediaRoot.of_rows(Path(path), root), []
    for row in valid_rows(Path(path)):
        refs = list(media_refs(row.columns.get("image"), "image", "image"))
        if len(refs) != 1:
            raise RowError(f"{row.place}: wanted one `image` to search, got {len(refs)}")
        images.append(media.medium(refs[0], row.place, FrameSampling()))
    return tuple(images)


@lru_cache(maxsize=2)
def embedded_images(
    path: str, root: str, changed: int, model: str, pretrained: str | None, device: str
) -> tuple[Any, Tensor]:
    """Load a CLIP model and embed the images of a file: unit vectors (images, dimensions)."""
    towers, images = load_towers(model, pretrained, device), read_images(path, root, changed)
    batches = [images[at : at + 32] for at in range(0, len(images), 32)]
    return towers, torch.cat([towers.look([one.load().pixels[0] for one in batch]) for batch in batches])
