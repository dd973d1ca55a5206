"""Data sets of prompts with images as conditions: edits of images, and first frames of videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Readable, Size
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import RowError, text, uid_of, unpacked
from mmrl.data.media import MAX_IMAGE_PIXELS, MediaError, read_image, upright_size
from mmrl.data.media_root import MediaRoot, media_refs
from mmrl.data.row_fields import has_content
from mmrl.data.row_sizes import SIZE, row_size
from mmrl.data.text_files import CAPTION, RecordedAnswers
from mmrl.data.video import FrameSampling
from mmrl.diffusion.image_io import image_size, load_image, load_video

# Column names in public data sets, in order of preference; the first non-empty one is read.
SOURCES = (
    "edit_image", "kontext_images", "source_images", "source_image", "source_img", "src_img", "input_image",
    "original_image", "images", "image", "file_name",
)  # fmt: skip
EDITED = (
    "edited_image", "edited_img", "target_image", "target_img", "output_image", "output", "image",
)  # fmt: skip
INSTRUCTIONS = ("instruction", "edit_prompt", "edited_prompt_list", "prompt", "caption")
MASKS = ("mask", "mask_image", "mask_img")
SizeOf = Literal["engine", "source", "row"]
FIRST_FRAMES = ("first_frame", "input_image", "image")


@data
def edits(
    *,
    path: str,
    root: str = "",
    columns: Mapping[str, str] | None = None,
    size: SizeOf = "engine",
    height: NonNegativeInt = 0,
    width: NonNegativeInt = 0,
    max_pixels: PositiveInt = MAX_IMAGE_PIXELS,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read image-edit prompts from JSON lines, JSON, CSV, parquet or a folder of the package `datasets`.

    A row has one or several source images and an instruction. It can also have an edited image, which becomes
    the recorded answer, and a `mask`, white where the image may change. Each is read from the first of
    several columns that has content. So public data sets can be read unchanged: OmniEdit (`src_img`,
    `edited_prompt_list`, `edited_img`), MagicBrush, InstructPix2Pix, GEdit-Bench, KontextBench (a folder with
    `metadata.jsonl`), and training sets of Qwen-Image-Edit and FLUX.1 Kontext (`edit_image` or
    `kontext_images`, `prompt`, and the edited `image`). Without another source column, `image` is the source.
    If a column holds a list of texts, the first is used. Rewards get the mask and all other columns.

    Args:
        path: The file or folder of rows.
        root: Folder of the images, which no path can leave; by default the folder of the rows.
        columns: Maps `source`, `instruction`, `edited` and `mask` to the columns of the file.
        size: Size of results. `engine`: the engine's size. `source`: the engine's area in the aspect ratio of
            the first source image, rounded to a size that the model can generate. `row`: the row's `height`
            and `width`, or as `source` if its `size` is "source"; not the default, because in many public
            data sets they are the size of the source image.
        height: Height in pixels to which edited images are resized, after they are cropped around the centre
            to the aspect ratio of `height` and `width`.
        width: Width in pixels; 0 for both keeps the images' own sizes.
        max_pixels: Maximum number of pixels of an edited image.
        bad_rows: Unusable rows raise (`error`) or are skipped and logged (`drop`).
        limit: Maximum number of rows to read; 0: all.
    """
    if bool(height) != bool(width):
        raise ConfigError(f"give both height and width, or neither; got {height} and {width}")
    roles = {"source": SOURCES, "edited": EDITED, "mask": MASKS, "instruction": INSTRUCTIONS}
    rows = ConditionedRows(Path(path), root, roles, columns or {}, size)
    load = lambda file: Outcome(image=load_image(file, height, width, max_pixels))
    size_of = lambda file: (1, height, width) if height else (1, *image_size(file))

    def make(row: DataRow, number: int) -> Prompt:
        chosen = rows.choose(row)
        images, edited, masks = (rows.media(row, chosen[role]) for role in ("source", "edited", "mask"))
        if not images:
            raise rows.wanted("source")
        if len(masks) > 1:
            raise RowError(f"wanted one mask, got {len(masks)}")
        kept = {"mask": checked_mask(masks[0], images[0])} if masks else {}
        return rows.prompt(row, number, images, chosen, recorded(edited, load, size_of), kept)

    return rows.read(make, bad_rows, limit)


@data
def first_frames(
    *,
    path: str,
    root: str = "",
    columns: Mapping[str, str] | None = None,
    size: SizeOf = "engine",
    num_frames: NonNegativeInt = 0,
    height: NonNegativeInt = 0,
    width: NonNegativeInt = 0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read prompts for image-to-video models, each a first frame and a text; file types as in `edits`.

    A row has an image (`first_frame`, `input_image` or `image`) and a `prompt` (or `caption`). It can also
    have a `video` that continues the image, which becomes the recorded answer. The model crops or resizes the
    image to the size of the result. Rewards get all other columns by name.

    Args:
        path: The file or folder of rows.
        root: Folder of the images and videos, which no path can leave; by default the folder of the rows.
        columns: Maps `first_frame`, `prompt` and `video` to the columns of the file.
        size: Size of results, as in `diffusion.edits`; a row can also set `num_frames`.
        num_frames: Evenly spaced frames to take from a recorded video; needed with recorded videos.
        height: Height in pixels to which recorded videos are scaled; needed with recorded videos.
        width: Width in pixels to which recorded videos are scaled; needed with recorded videos.
        bad_rows: Unusable rows raise (`error`) or are skipped and logged (`drop`).
        limit: Maximum number of rows to read; 0: all.
    """
    roles = {"first_frame": FIRST_FRAMES, "video": ("video",), "prompt": CAPTION}
    rows = ConditionedRows(Path(path), root, roles, columns or {}, size)

    def load(file: Path) -> Outcome:
        frames, times = load_video(file, num_frames, height, width)
        return Outcome(video=frames, times=times)

    def make(row: DataRow, number: int) -> Prompt:
        chosen = rows.choose(row)
        images, videos = rows.media(row, chosen["first_frame"]), rows.media(row, chosen["video"], "video")
        if len(images) != 1:
            raise rows.wanted("first_frame")
        if videos and not (num_frames and height and width):
            raise RowError("the row has a `video`; set `num_frames`, `height` and `width` of the data")
        answers = recorded(videos, load, lambda file: (num_frames, height, width))
        return rows.prompt(row, number, images, chosen, answers, {})

    return rows.read(make, bad_rows, limit)


class ConditionedRows:
    """Reader of rows with a text and images, whose columns can have one of several names.

    Args:
        path: The file or folder of rows.
        root: Folder of the media; empty: the folder of the rows.
        roles: Maps each role, such as "source", to its possible column names. The first column with content
            is read. The last role is the text, all others are media.
        columns: Maps roles to the names of their columns in this file.
        size: How the size of results is determined; see `edits`.
    """

    def __init__(
        self,
        path: Path,
        root: str,
        roles: Mapping[str, Sequence[str]],
        columns: Mapping[str, str],
        size: SizeOf,
    ) -> None:
        if unknown := sorted(columns.keys() - roles.keys()):
            raise ConfigError(f"`columns` maps {', '.join(roles)}; there is no '{unknown[0]}'")
        self.path, self.media_root = path, MediaRoot.of_rows(path, root)
        self.roles = {
            role: (columns[role],) if role in columns else (*names,) for role, names in roles.items()
        }
        self.names = [*dict.fromkeys(name for names in self.roles.values() for name in names)]
        self.text, self.size = [*roles][-1], size

    def read(self, make: Callable[[DataRow, int], Prompt], bad_rows: str, limit: int) -> Sequence[Prompt]:
        """Create a prompt from every row with `make`; see `read_prompts`."""
        rows = Rows(self.path, self.media_root.root)
        texts = self.roles[self.text]  # a tuple: alternative column names
        sizes = (*SIZE, "size") if self.size == "row" else ()
        reads = [*(name for name in self.names if name not in texts), texts, *sizes]
        return read_prompts(self.path, rows, make, reads=reads, bad_rows=bad_rows, limit=limit)

    def choose(self, row: DataRow) -> dict[str, str]:
        """Map each role to its first non-empty column that no earlier role uses; "" without one.

        Raises `RowError` if a column with an image or video remains unused.
        """
        filled = [name for name in self.names if has_content(row.columns.get(name))]
        chosen: dict[str, str] = {}
        for role, names in self.roles.items():
            free = (name for name in names if name in filled and name not in chosen.values())
            chosen[role] = next(free, "")
        texts = self.roles[self.text]
        for name in filled:
            if name not in chosen.values() and name not in texts:
                raise RowError(f"nothing reads `{name}` beside {', '.join(filter(None, chosen.values()))}")
        return chosen

    def media(self, row: DataRow, column: str, kind: str = "image") -> list[Media]:
        """Return the media in a column of a row; an empty list if `column` is empty."""
        if not column:
            return []
        try:
            refs = list(media_refs(row.columns[column], kind, column))
            return [self.media_root.medium(ref, row.place, FrameSampling()) for ref in refs]
        except MediaError as error:
            raise MediaError(f"`{column}`: {error}") from error

    def prompt(
        self,
        row: DataRow,
        number: int,
        images: Sequence[Media],
        chosen: Mapping[str, str],
        answers: RecordedAnswers | tuple[()],
        kept: Mapping[str, Any],
    ) -> Prompt:
        """Create a prompt of images and then a text. Its columns are `kept` and the row's unread columns."""
        parts = (*(Part(media=image) for image in images), Part(self.words(row, chosen[self.text])))
        read = {*self.names} - {*self.roles[self.text]} | {*chosen.values()}
        others = {name: value for name, value in row.all.items() if name not in read}
        uid = uid_of(row.all, f"{row.split}#{number}")
        asked = row_size(row.columns, source=True) if self.size == "row" else None
        asked = Size(source=True) if self.size == "source" else asked
        return Prompt(uid, (Message("user", parts),), None, answers, {**others, **kept}, size=asked)

    def words(self, row: DataRow, column: str) -> str:
        """Return the text in a column, or the first text if the column holds a list."""
        if not column:
            raise RowError(f"wanted a text in {' or '.join(map(repr, self.roles[self.text]))}")
        value = unpacked(row.columns[column])
        return text(value[0] if isinstance(value, list | tuple) and value else value, column).strip()

    def wanted(self, role: str) -> RowError:
        """Create the error about a row that lacks an image for `role`."""
        return RowError(f"wanted an image in {' or '.join(map(repr, self.roles[role]))}")


def recorded(media: Sequence[Media], load: Callable, size: Callable) -> RecordedAnswers | tuple[()]:
    """Create recorded answers with score 1 from media; `load` decodes a path or bytes, `size` measures it."""
    if not media:
        return ()
    read = lambda source: source if isinstance(source, Path | bytes) else source.read()
    files = tuple(medium.source for medium in media)
    scores = ({"score": 1.0},) * len(files)
    return RecordedAnswers(files, scores, lambda file: load(read(file)), lambda file: size(read(file)))


@dataclass(frozen=True)
class LoadsMask:
    """Callable that decodes a mask, white where the image may change; transparent pixels become black."""

    source: Path | bytes | Readable
    name: str

    def __call__(self) -> Frames:
        """Decode the mask: one frame (1, 3, height, width)."""
        import numpy

        source = self.source if isinstance(self.source, Path | bytes) else self.source.read()
        image = torch.from_numpy(numpy.array(read_image(source, self.name, transparent=True)))
        color, opacity = image[..., :3].double(), image[..., 3:].double() / 255  # (height, width, 3), (.., 1)
        pixels = (color * opacity).round().to(torch.uint8).permute(2, 0, 1)[None]
        return Frames(pixels.contiguous(), torch.zeros(1, dtype=torch.float64))


def checked_mask(mask: Media, image: Media) -> Media:
    """Return a mask as a medium; raises `RowError` if its size differs or no pixel is light."""
    assert mask.source is not None, "masks are files, or bytes inside rows"
    loaded = Media("image", mask.name, LoadsMask(mask.source, mask.name), mask.source)
    pixels = loaded.load().pixels
    width, height = upright_size(image.source, image.name)
    if pixels.shape[-2:] != (height, width):
        high, wide = pixels.shape[-2:]
        raise RowError(f"the mask is {high} x {wide} pixels, and its image {height} x {width}")
    if 0 < (brightest := int(pixels.max())) < 128:
        raise RowError(
            f"the mask '{mask.name}' is at most {brightest} of 255; white, 255, is where the image may change"
        )
    return loaded
