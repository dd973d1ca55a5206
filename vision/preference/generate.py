"""Generation of scored answer pairs about unlabelled images, which come from a folder or from rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from mmrl.config.binding import Bound
from mmrl.core.protocols import Engine
from mmrl.core.types import Media, Prompt, Trajectory
from mmrl.data.dataset_io import Rows, row_files
from mmrl.data.fields import RowError, text
from mmrl.data.media_root import MediaRef, MediaRoot, decode_image, media_of
from mmrl.data.video import MediaError
from mmrl.runtime.content_hash import of_files
from mmrl.vision.media.dataset_writer import image_suffix, is_image_file
from mmrl.vision.media.prompts import ask
from mmrl.vision.preference.select import ScoredPair


@dataclass(frozen=True)
class SourceItem:
    """An image of a source with the prompt of its row, if any; for an invalid row, the error message."""

    place: str
    ref: MediaRef | None = None
    prompt: str = ""
    fault: str = ""


class ImageSource:
    """The images of a folder or of data rows, in a fixed order; every iteration starts at the beginning."""

    def __init__(self, source: str, root: str, limit: int = 0) -> None:
        self.source, self.limit = Path(source), limit
        self.root = MediaRoot.of_rows(self.source, root, cache_bytes=0)  # every image is read only once
        try:
            self.files = row_files(self.source)
        except RowError:
            if not self.source.is_dir():
                raise
            self.files = []

    def __iter__(self) -> Iterator[SourceItem]:
        return islice(self._of_rows() if self.files else self._of_folder(), self.limit or None)

    def content(self) -> str:
        """Hash the content of the row files, or the file names in a folder of images.

        The content of the images is checked later, when the pairs are written.
        """
        if self.files:
            return of_files(self.files)
        names = "".join(f"{item.place}\n" for item in self._of_folder())
        return hashlib.sha256(names.encode()).hexdigest()

    def bytes_of(self, ref: MediaRef) -> bytes:
        """Read an image file without decoding it."""
        try:
            return ref.data or self.root.locate(ref.path).read_bytes()
        except OSError as error:
            raise MediaError(f"cannot read '{ref.path}': {error}") from error

    def _of_folder(self) -> Iterator[SourceItem]:
        for folder, subfolders, names in os.walk(self.source):
            # Sort the list in place, because `os.walk` visits the subfolders in its order.
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for path in (Path(folder, name) for name in sorted(names)):
                if is_image_file(path):
                    relative = path.relative_to(self.source).as_posix()
                    yield SourceItem(relative, MediaRef("image", relative))

    def _of_rows(self) -> Iterator[SourceItem]:
        for row in Rows(self.source, self.root.root):
            place = row.place.removeprefix(f"{self.source.parent}{os.sep}")
            try:
                if row.fault:
                    raise RowError(row.fault)
                media = list(media_of(row.columns))
                if [ref.kind for ref in media] != ["image"]:
                    raise RowError(f"wanted one image, got {len(media)} media")
                prompt = row.columns.get("prompt", row.columns.get("question"))
                yield SourceItem(place, media[0], "" if prompt is None else text(prompt, "prompt"))
            except RowError as error:
                yield SourceItem(place, fault=str(error))


def digest_of(data: bytes) -> str:
    """Hash the bytes of an image to 32 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:32]  # 128 bits


# ---- generation of answers


def generate_pairs(
    items: Iterable[SourceItem],
    images: ImageSource,
    folder: Path,
    engine: Engine,
    reward: Bound,
    choose_prompt: Callable[[SourceItem], str],
) -> list[ScoredPair]:
    """Generate two answers to each image with an engine, and score both with a reward.

    Pairs are in the order of the items. An item that cannot be used becomes a pair with a `fault`. Images
    that are stored inside rows are written to `folder`.
    """
    pairs: list[ScoredPair] = []
    prompts: dict[str, Prompt] = {}
    for item in items:
        pair, image = _decoded(item, images, folder)
        if image is not None:
            prompts[item.place] = ask(item.place, [image], choose_prompt(item), None, {})
            pair = replace(pair, prompt=prompts[item.place].text)
        pairs.append(pair)
    if not prompts:
        return pairs
    twice = [prompt for prompt in prompts.values() for _ in range(2)]  # two answers per image
    rows: dict[str, list[Trajectory]] = {uid: [] for uid in prompts}
    for row in engine.rollout(twice):
        rows[row.prompt.uid].append(row)
    for uid, both in rows.items():
        if len(both) != 2:
            raise ValueError(f"the engine gave {len(both)} answers about '{uid}', not two")
        # Sort by hallucination ratio: the answer with the lower ratio should be better.
        both.sort(key=lambda row: row.outcomes[-1].recorded.get("contrast_alpha", 0.0))
    scores = iter(reward(twice, [row.outcomes[-1] for both in rows.values() for row in both]))
    # Encoders such as CLIP read a limited number of tokens; other rewards read texts of any length.
    reads_whole = getattr(reward.function, "reads_whole", lambda text: True)
    answers = {}
    for uid, both in rows.items():
        texts = tuple(row.outcomes[-1].text or "" for row in both)
        answers[uid] = {
            "texts": texts,
            "lengths": tuple(row.length for row in both),
            "scores": tuple(
                None if score is None else float(score) for score in (next(scores), next(scores))
            ),
            "h": tuple(row.outcomes[-1].recorded.get("contrast_alpha") for row in both),
            "split": tuple(not reads_whole(text) for text in texts),
        }
    return [pair if pair.fault else replace(pair, **answers[pair.place]) for pair in pairs]


def _decoded(item: SourceItem, images: ImageSource, folder: Path) -> tuple[ScoredPair, Media | None]:
    """Decode the image of an item. On failure, return a pair with a fault, and None instead of the image."""
    name, fault = "", "bad_row"
    try:
        if item.ref is None:
            raise MediaError(item.fault)
        name, fault = item.ref.path or item.place, "missing"
        data = images.bytes_of(item.ref)
        fault = "unreadable"  # the fault for any error below
        frames = decode_image(data, name)
    except MediaError as error:
        return ScoredPair(item.place, name, fault=fault, what=str(error)), None
    digest = digest_of(data)
    if item.ref.data:
        name = f"{digest}{image_suffix(data)}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return ScoredPair(item.place, name, digest=digest), Media("image", name, lambda: frames)
