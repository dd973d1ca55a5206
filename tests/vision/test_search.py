"""The tool that searches texts: its scores by hand, its order, and what it does not read."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from PIL import Image

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.data.fields import RowError
from mmrl.data.media import MediaError
from mmrl.vision.tools.functions import Tool
from mmrl.vision.tools.pool import run_calls
from mmrl.vision.tools.replies import Limits
from mmrl.vision.tools.search import read_index, search, search_images

CAPTIONS = ("a red crab on a rocket", "a crab, a crab and a book", "the sky")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "captions.jsonl"
    file.write_text("".join(json.dumps({"caption": caption}) + "\n" for caption in CAPTIONS))
    return file


def test_scores_are_those_of_bm25_by_hand(path):
    index = read_index(str(path), "caption", 0)  # 6, 7 and 2 words: 5 on average
    first, second = 1.2 * (0.25 + 0.75 * 6 / 5), 1.2 * (0.25 + 0.75 * 7 / 5)
    crab, book = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    assert index.score("the crab", 0) == pytest.approx(crab * 2.2 / (1 + first))
    assert index.score("Crab", 1) == pytest.approx(crab * 2 * 2.2 / (2 + second))
    assert index.score("crab book", 1) == pytest.approx(crab * 4.4 / (2 + second) + book * 2.2 / (1 + second))
    assert index.score("crab crab", 2) == 0.0


def test_the_best_come_first_and_no_more_than_asked_for(path):
    assert search("crab", path=str(path)) == f"{CAPTIONS[1]}\n{CAPTIONS[0]}"
    assert search("crab", path=str(path), most=1) == CAPTIONS[1]
    assert search("tractor", path=str(path)) == search("", path=str(path)) == "nothing was found"


def test_equal_texts_stand_as_in_the_file(tmp_path):
    file = tmp_path / "same.jsonl"
    file.write_text("".join(json.dumps({"id": i, "caption": f"crab {i}"}) + "\n" for i in range(5)))
    assert search("crab", path=str(file), most=5).split("\n") == [f"crab {i}" for i in range(5)]


def test_a_file_that_changed_is_read_anew(path):
    assert "rocket" in search("rocket", path=str(path))
    path.write_text(json.dumps({"caption": "a fox"}) + "\n")
    assert search("rocket", path=str(path)) == "nothing was found"


def test_a_model_names_the_query_alone(path):
    bound = Pieces(Stream(0)).name("tool", Piece("vision.search", {"path": str(path), "most": 1}))
    tool = Tool.of(bound)
    properties = tool.schema["function"]["parameters"]["properties"]
    assert tool.name == "search" and list(properties) == ["query"]
    (answer,) = run_calls([(tool, tool.bind({"query": "sky"}, ()))], Limits(1000, 1000))
    assert [part.text for part in answer.parts] == ["the sky"]


def test_a_row_without_a_text_is_an_error(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"title": "crab"}) + "\n")
    with pytest.raises(RowError, match="caption"):
        search("crab", path=str(file))


def test_rows_of_a_table_are_searched_as_a_whole(tmp_path):
    file = tmp_path / "table.jsonl"
    file.write_text('{"city": "Leiden", "inhabitants": 127000}\n{"city": "Delft", "mayor": null}\n')
    assert search("leiden", path=str(file), column="") == "city: Leiden; inhabitants: 127000"
    assert search("delft", path=str(file), column="") == "city: Delft"


def test_images_are_found_by_their_captions_or_by_clip(tmp_path, monkeypatch):
    colours = {"red": "a crab", "blue": "the sky"}
    for colour in colours:
        Image.new("RGB", (32, 16), colour).save(tmp_path / f"{colour}.png")
    file = tmp_path / "images.jsonl"
    rows = [{"image": f"{colour}.png", "caption": caption} for colour, caption in colours.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    image, caption = search_images("the sky", path=str(file))
    assert image.getpixel((0, 0)) == (0, 0, 255) and caption == "the sky"
    assert search_images("tractor", path=str(file)) == "nothing was found"

    class Towers:
        """Embeds an image as its mean colour, and a text as the colour that it names."""

        def look(self, images):
            return torch.stack([pixels.float().mean((1, 2)) / 255 for pixels in images])

        def read(self, texts):
            return torch.tensor(
                [[float(colour in text) for colour in ("red", "green", "blue")] for text in texts]
            )

    monkeypatch.setattr("mmrl.vision.tools.search.load_towers", lambda *options: Towers())
    found = search_images("what is red", path=str(file), model="tiny", most=2)
    assert found[1::2] == ["a crab", "the sky"], "the best image first"
    file.write_text(json.dumps({"image": "../red.png", "caption": "outside"}) + "\n")
    os.utime(file, ns=(1, 1))
    with pytest.raises(MediaError):
        search_images("outside", path=str(file))
    file.write_text(json.dumps({"caption": "no image"}) + "\n")
    os.utime(file, ns=(2, 2))
    with pytest.raises(RowError, match="wanted one `image` to search, got 0"):
        search_images("image", path=str(file))
