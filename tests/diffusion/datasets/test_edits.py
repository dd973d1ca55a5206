"""Edits and first frames are read in the forms of public sets; a bad row is named with its line."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from mmrl.config.loading import ConfigError
from mmrl.data.dataset_io import RowError
from mmrl.diffusion.datasets.edits import edits, first_frames

SIZES = {"a.png": (6, 4), "b.png": (8, 8), "small.png": (3, 2)}  # width, height


@pytest.fixture
def rows(tmp_path):
    """Write rows beside images of distinct sizes, and give the path of the rows."""
    for i, (name, size) in enumerate(SIZES.items()):
        Image.new("RGB", size, (10 * i, 20, 30)).save(tmp_path / name)

    Image.new("L", (6, 4), 1).save(tmp_path / "ones.png")  # of 0 and 1 instead of 0 and 255
    mask = Image.new("LA", (6, 4), (255, 0))  # transparent where the image stays
    mask.paste((255, 255), (0, 0, 3, 4))
    mask.save(tmp_path / "mask.png")

    def write(*rows, name="rows.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


def sizes(prompt):
    return [tuple(medium.load().pixels.shape[-2:]) for medium in prompt.media]


@pytest.mark.parametrize(
    ("row", "wanted", "edited"),
    [
        ({"image": "a.png", "prompt": "red"}, [(4, 6)], 0),
        ({"images": ["a.png", "b.png"], "prompt": "red"}, [(4, 6), (8, 8)], 0),
        # OmniEdit, MagicBrush, InstructPix2Pix, GEdit-Bench, KontextBench
        (
            {"src_img": "a.png", "edited_prompt_list": ["red", "b"], "edited_img": "b.png"},
            [(4, 6)],
            1,
        ),
        ({"source_img": "a.png", "instruction": "red", "target_img": "b.png"}, [(4, 6)], 1),
        (
            {
                "original_prompt": "x",
                "original_image": "a.png",
                "edit_prompt": "red",
                "edited_image": "b.png",
            },
            [(4, 6)],
            1,
        ),
        ({"input_image": "a.png", "instruction": "red", "task_type": "color"}, [(4, 6)], 0),
        ({"file_name": "a.png", "instruction": "red", "category": "local"}, [(4, 6)], 0),
        # Training sets of Qwen-Image-Edit and FLUX.1 Kontext: `image` is the edited one.
        ({"image": "b.png", "edit_image": ["a.png"], "prompt": "red"}, [(4, 6)], 1),
        ({"image": "b.png", "kontext_images": "a.png", "prompt": "red"}, [(4, 6)], 1),
    ],
)
def test_rows_of_public_sets(rows, row, wanted, edited):
    (prompt,) = edits(path=rows({"id": "x", **row}))
    assert (prompt.uid, prompt.text, sizes(prompt)) == ("x", "red", wanted)
    assert [answer.image.shape for answer in prompt.answers] == [(3, 8, 8)] * edited
    if edited:
        assert prompt.answers.sizes() == [(1, 8, 8)] and prompt.answers[0].recorded == {"score": 1.0}


def test_images_inside_rows_and_other_columns(rows, tmp_path):
    datasets = pytest.importorskip("datasets")
    image = {"bytes": (tmp_path / "a.png").read_bytes() if rows() else b"", "path": None}
    other = {"bytes": (tmp_path / "b.png").read_bytes(), "path": None}
    table = {"src_img": [image], "edited_img": [other], "instruction": ["red"], "o_score": [8.5]}
    datasets.Dataset.from_dict(table).to_parquet(tmp_path / "rows.parquet")
    (prompt,) = edits(path=str(tmp_path / "rows.parquet"), height=4, width=2)
    assert sizes(prompt) == [(4, 6)] and prompt.columns == {"o_score": 8.5}
    assert prompt.answers[0].image.shape == (3, 4, 2) and prompt.answers.sizes() == [(1, 4, 2)]


def test_a_mask_of_the_images_size_is_a_column(rows):
    (prompt,) = edits(path=rows({"image": "a.png", "mask": "mask.png", "prompt": "red"}))
    pixels = prompt.columns["mask"].load().pixels
    assert pixels.shape == (1, 3, 4, 6) and (pixels[..., :3] == 255).all() and (pixels[..., 3:] == 0).all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "red"}, "wanted an image in 'edit_image'"),
        ({"image": "a.png"}, "wanted a text in 'instruction'"),
        ({"image": "nothing.png", "prompt": "red"}, "nothing.png"),
        ({"image": "../a.png", "prompt": "red"}, "a.png"),
        (
            {"image": "a.png", "mask": "small.png", "prompt": "red"},
            "mask is 2 x 3 pixels",
        ),
        (
            {"edit_image": "a.png", "edited_image": "b.png", "image": "b.png", "prompt": "red"},
            "nothing reads `image` beside edit_image, edited_image",
        ),
    ],
)
def test_a_bad_row_is_named(rows, row, message):
    path = rows({"image": "a.png", "prompt": "blue"}, row)
    with pytest.raises(RowError, match="rows.jsonl:2") as error:
        edits(path=path)
    assert message in str(error.value)
    assert [prompt.text for prompt in edits(path=path, bad_rows="drop")] == ["blue"]


def test_columns_of_other_names(rows):
    path = rows({"before": "a.png", "after": "b.png", "say": "red"})
    names = {"source": "before", "edited": "after", "instruction": "say"}
    (prompt,) = edits(path=path, columns=names)
    assert (prompt.text, sizes(prompt), len(prompt.answers)) == ("red", [(4, 6)], 1)
    with pytest.raises(ConfigError, match="there is no 'sauce'"):
        edits(path=path, columns={"sauce": "before"})


def test_first_frames(rows):
    (prompt,) = first_frames(path=rows({"image": "a.png", "prompt": "it moves", "speed": 2}))
    assert (prompt.text, sizes(prompt), prompt.columns) == ("it moves", [(4, 6)], {"speed": 2})
    with pytest.raises(RowError, match="wanted an image in 'first_frame'"):
        first_frames(path=rows({"prompt": "it moves"}))
    with pytest.raises(RowError, match="set `num_frames`"):
        first_frames(path=rows({"image": "a.png", "prompt": "it moves", "video": "a.png"}))
