"""Prompts and images are read as they stand, and what is wrong with a file is said with its line."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from mmrl.data.dataset_io import RowError
from mmrl.diffusion.datasets.prompts import images, prompts


@pytest.fixture
def file(tmp_path):
    """Write lines (objects as JSON) into a file, and give its path."""

    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if type(row) is str else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def root(tmp_path):
    """A folder with three images of one grey each: 10, 20 and 30."""
    for i, shade in enumerate((10, 20, 30)):
        Image.new("RGB", (4, 2), (shade,) * 3).save(tmp_path / f"{i}.png")
    return str(tmp_path)


# ---- prompts


def test_prompts_of_a_text_file_are_its_lines(file):
    found = prompts(path=file("a cat", "", "  a dog ", name="p.txt"))
    assert [prompt.text for prompt in found] == ["a cat", "a dog"]
    assert [prompt.uid for prompt in found] == ["p#1", "p#3"]


def test_prompts_keep_their_names_however_much_is_read(file):
    path = file(*"abc", name="p.txt")
    assert list(prompts(path=path, limit=2)) == list(prompts(path=path)[:2])


def test_prompts_of_objects_have_columns_target_and_id(file):
    row = {"id": "x", "prompt": "two cats", "target": 2, "metadata": {"tag": "counting", "include": ["cat"]}}
    (prompt,) = prompts(path=file(row))
    assert (prompt.uid, prompt.text, prompt.target) == ("x", "two cats", 2)
    assert prompt.columns["tag"] == "counting" and prompt.columns["include"] == ["cat"]


def test_a_format_overrides_the_ending(file):
    assert prompts(path=file({"prompt": "a cat"}, name="p.dat"), format="jsonl")[0].text == "a cat"
    assert prompts(path=file("{not json}", name="p.json"), format="txt")[0].text == "{not json}"


def test_line_separators_inside_a_text_do_not_end_a_row(file):
    assert prompts(path=file('{"prompt": "a\u2028b"}'))[0].text == "a\u2028b"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"prompt": "a"}', "{"], r"rows.jsonl:2: not a JSON object"),
        (["[1]"], r"rows.jsonl:1: not a JSON object, but \[1\]"),
        ([{"text": "a"}], r"rows.jsonl:1: wanted a key 'prompt' or 'caption' \(the row has text\)"),
        ([{"prompt": " "}], r"rows.jsonl:1: wanted a text as `prompt`, got ' '"),
        ([{"prompt": 3}], r"rows.jsonl:1: wanted a text as `prompt`, got 3"),
        ([{"prompt": "a", "metadata": 0}, {"prompt": "b"}], r"wanted an object as `metadata`, got 0"),
        ([{"prompt": 1}, {"prompt": "b"}, {"prompt": 2}], r"2 rows of(?s:.*)jsonl:1: (?s:.*)jsonl:3: "),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}], r"jsonl:2: the id '1' is that of .*jsonl:1"),
        ([], r"holds no row"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(file, rows, message):
    with pytest.raises(RowError, match=message):
        prompts(path=file(*rows))


def test_a_file_that_is_not_utf_8_or_not_there_is_an_error(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"a cat\n\xff\xfe\n")
    with pytest.raises(RowError, match=r"p.txt:2: not UTF-8"):
        prompts(path=str(tmp_path / "p.txt"))
    with pytest.raises(RowError, match="there is no file"):
        prompts(path=str(tmp_path / "q.txt"))


# ---- images


def shades(prompt):
    return [int(answer.image[0, 0, 0]) for answer in prompt.answers]


def test_a_image_is_a_demonstration_with_score_1(file, root):
    (prompt,) = images(path=file({"caption": "grey", "image": "1.png"}), root=root)
    assert prompt.text == "grey" and len(prompt.answers) == 1
    (answer,) = prompt.answers
    assert answer.image.shape == (3, 2, 4) and answer.image.dtype == torch.uint8
    assert shades(prompt) == [20] and answer.recorded == {"score": 1.0}


def test_a_pair_is_chosen_then_rejected(file, root):
    row = {"prompt": "grey", "rejected": "0.png", "chosen": "2.png"}
    (prompt,) = images(path=file(row), root=root)
    assert shades(prompt) == [30, 10]
    assert [answer.recorded["score"] for answer in prompt.answers] == [1.0, 0.0]


def test_a_pool_has_a_score_for_each_image_by_the_name_of_a_reward(file, root):
    pool = {"prompt": "grey", "images": ["0.png", "1.png", "2.png"]}
    rows = [
        {**pool, "scores": [0.5, 2, -1]},
        {**pool, "scores": {"clip": [1, 2, 3], "taste": [3, 2, 1]}},
        pool,
    ]
    found = images(path=file(*rows), root=root)
    recorded = [[answer.recorded for answer in prompt.answers] for prompt in found]
    assert recorded[0] == [{"score": 0.5}, {"score": 2.0}, {"score": -1.0}]
    assert recorded[1][2] == {"clip": 3.0, "taste": 1.0}
    assert recorded[2] == [{"score": 1.0}] * 3
    assert shades(found[0]) == [10, 20, 30]


def test_images_are_decoded_when_somebody_looks(file, root, tmp_path):
    (prompt,) = images(path=file({"prompt": "grey", "image": "1.png"}), root=root)
    (tmp_path / "1.png").write_bytes(b"no picture")
    with pytest.raises(RowError, match="cannot decode"):
        prompt.answers[0]


def test_images_are_cut_around_the_middle_and_resized(file, tmp_path):
    wide = Image.new("RGB", (6, 2), "red")
    wide.paste((0, 0, 255), (2, 0, 4, 2))
    wide.save(tmp_path / "w.png")
    (prompt,) = images(path=file({"prompt": "x", "image": "w.png"}), root=str(tmp_path), height=2, width=2)
    image = prompt.answers[0].image
    assert image.shape == (3, 2, 2)
    assert (image[2] == 255).all() and (image[0] == 0).all()  # the middle third alone


def test_what_is_transparent_becomes_white_and_images_stand_upright(file, tmp_path):
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "t.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    Image.new("RGB", (4, 2), "black").save(tmp_path / "r.png", exif=turned)
    rows = [{"prompt": "t", "image": "t.png"}, {"prompt": "r", "image": "r.png"}]
    clear, upright = (p.answers[0].image for p in images(path=file(*rows), root=str(tmp_path)))
    assert (clear == 255).all()
    assert upright.shape == (3, 4, 2)


def test_every_missing_file_is_named_at_once(file, root):
    rows = [{"prompt": "a", "image": f"{name}.png"} for name in ("0", "x", "y")]
    with pytest.raises(RowError, match=r"(?s)2 rows .*jsonl:2: there is no file 'x.png'.*'y.png'"):
        images(path=file(*rows), root=root)


def test_a_path_may_not_leave_the_root_and_a_image_not_pass_its_limit(file, root):
    with pytest.raises(RowError, match="leaves its root"):
        images(path=file({"prompt": "a", "image": "../0.png"}), root=root)
    (prompt,) = images(path=file({"prompt": "a", "image": "0.png"}), root=root, max_pixels=7)
    with pytest.raises(RowError, match=r"4x2 pixels; the limit is 7"):
        prompt.answers[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, r"jsonl:1: wanted one of `image`, `images`, or `chosen` and `rejected`, got \[\]"),
        ({"prompt": "a", "image": "0.png", "images": ["1.png"]}, r"got \['image', 'images'\]"),
        ({"prompt": "a", "chosen": "0.png"}, r"got \['chosen'\]"),
        ({"prompt": "a", "images": []}, r"wanted one of"),
        ({"prompt": "a", "images": ["0.png", 1]}, r"wanted a text as `path of image 1`, got 1"),
        ({"prompt": "a", "images": ["0.png", "1.png"], "scores": [1]}, r"a list of 2 as `scores`"),
        (
            {"prompt": "a", "image": "0.png", "scores": {"clip": ["x"]}},
            r"number as `scores: clip\[0\]`",
        ),
        ({"image": "0.png"}, r"wanted a key 'prompt' or 'caption'"),
    ],
)
def test_a_wrong_row_of_images_is_named_with_its_line(file, root, row, message):
    with pytest.raises(RowError, match=message):
        images(path=file(row), root=root)


def test_a_size_wants_both_sides_and_a_file_some_row(file, root):
    with pytest.raises(ValueError, match="both height and width"):
        images(path=file({"prompt": "a", "image": "0.png"}), root=root, height=4)
    with pytest.raises(RowError, match="holds no row"):
        images(path=file(), root=root)


def test_the_engine_stored_reads_images_in_order(file, root):
    from mmrl.core.rng import Stream
    from mmrl.engines.dataset_answers import Offline

    class Seen:
        def encode(self, prompt, outcome):
            return int(outcome.image[0, 0, 0])

    found = images(path=file({"prompt": "a", "images": ["0.png", "1.png"]}), root=root)
    assert Offline(Seen(), stream=Stream()).rollout([*found] * 3) == (10, 20, 10)
