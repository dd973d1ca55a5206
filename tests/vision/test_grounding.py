"""The grounding data set: what is asked, what is wanted, and rows that cannot be used."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from examples.video_grounding.spliced_videos import write_video
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import RowError
from mmrl.vision.datasets.grounding import grounding
from mmrl.vision.rewards.grounding import temporal_iou


def made(tmp_path, *rows, duration=10.0, **options):
    """Read rows about one clip that lies under the root, and lasts as long as they say."""
    (tmp_path / "media").mkdir(exist_ok=True)
    (tmp_path / "media" / "a.mp4").touch()
    path = tmp_path / "rows.jsonl"
    base = {"video": "a.mp4", "query": "He Jumps.", "duration": duration}
    path.write_text("".join(json.dumps({**base, **row}) + "\n" for row in rows))
    return grounding(path=str(path), root=str(tmp_path / "media"), stream=Stream(0), **options)


def many(tmp_path, count=200, seed=0, **options):
    rows = [{"id": f"r{i}", "start": 1, "end": 2, "reasoning": f"since {i}"} for i in range(count)]
    made(tmp_path, *rows)
    return grounding(
        path=str(tmp_path / "rows.jsonl"), root=str(tmp_path / "media"), stream=Stream(seed), **options
    )


SPAN = {"start": 2, "end": 4.5}


def test_grounding_asks_about_a_clip_and_wants_its_span(tmp_path):
    (prompt,) = made(tmp_path, {**SPAN, "id": "r1", "level": 3})
    assert prompt.uid == "r1"
    assert [part.media is not None for part in prompt.messages[0].parts] == [True, False]
    assert prompt.messages[0].role == "user"
    assert (prompt.media[0].kind, prompt.media[0].name) == ("video", "a.mp4")
    assert '"he jumps"' in prompt.text
    assert "<think>" not in prompt.text
    assert prompt.target.spans == ((2, 4.5),)
    assert prompt.target.duration == 10
    assert prompt.columns["level"] == 3
    assert (prompt.columns["query"], prompt.columns["format"]) == ("he jumps", "answer")


def test_grounding_can_leave_the_query_as_it_is(tmp_path):
    (prompt,) = made(tmp_path, SPAN, normalize_text=False)
    assert '"He Jumps."' in prompt.text


def test_normalising_takes_one_full_stop_only(tmp_path):
    (prompt,) = made(tmp_path, {**SPAN, "query": "  Wait... {now} "})
    assert prompt.columns["query"] == "wait... {now}"
    (prompt,) = made(tmp_path, {**SPAN, "query": "Wait..."})
    assert prompt.columns["query"] == "wait.."


def test_grounding_takes_words_of_ones_own(tmp_path):
    (prompt,) = made(tmp_path, SPAN, prompt="when: {query}?")
    assert prompt.text == "when: he jumps?"
    (prompt,) = made(tmp_path, SPAN, reasoning=1.0, reasoning_prompt="think when: {query}?")
    assert prompt.text == "think when: he jumps?"


def test_a_direct_prompt_is_demonstrated_by_a_direct_answer(tmp_path):
    for mode in ("none", "empty", "provided"):
        (prompt,) = made(tmp_path, {**SPAN, "reasoning": "he bends"}, demo_think=mode)
        (demo,) = prompt.answers
        assert demo.text == "<answer> 2.00 to 4.50 </answer>"
        assert demo.tags["format"] == "answer"


@pytest.mark.parametrize(
    ("mode", "text", "form"),
    [
        ("empty", "<think></think> <answer> 2.00 to 4.50 </answer>", "think,answer"),
        ("provided", "<think>he bends</think> <answer> 2.00 to 4.50 </answer>", "think,answer"),
    ],
)
def test_a_reasoning_prompt_is_demonstrated_with_a_thought(tmp_path, mode, text, form):
    (prompt,) = made(tmp_path, {**SPAN, "reasoning": "he bends"}, reasoning=1.0, demo_think=mode)
    assert "<think>" in prompt.text
    assert prompt.columns["format"] == "think,answer"
    assert prompt.answers[0].text == text
    assert prompt.answers[0].tags["format"] == form


def test_a_reasoning_prompt_without_a_thought_is_not_demonstrated(tmp_path):
    # Answers alone, in groups asked to think, would teach the model not to think.
    (prompt,) = made(tmp_path, {**SPAN, "reasoning": "he bends"}, reasoning=1.0)
    assert not prompt.answers


def test_a_demonstration_earns_everything(tmp_path):
    for mode in ("empty", "provided"):
        (prompt,) = made(tmp_path, {**SPAN, "reasoning": "from 1 to 9"}, reasoning=1.0, demo_think=mode)
        assert temporal_iou([prompt], prompt.answers) == [1]


def test_provided_reasoning_that_is_missing_names_the_row(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1.*`reasoning`"):
        made(tmp_path, SPAN, reasoning=1.0, demo_think="provided")


def test_decimals_are_those_of_the_demonstration(tmp_path):
    (prompt,) = made(tmp_path, {"start": 1.26, "end": 3}, decimals=1)
    assert prompt.answers[0].text == "<answer> 1.3 to 3.0 </answer>"


def test_the_share_of_reasoning_is_kept_and_reproducible(tmp_path):
    thinks = [p.columns["format"] == "think,answer" for p in many(tmp_path, reasoning=0.3)]
    # Of 200 draws of probability 0.3, 60 are expected; the deviation is 6.5.
    assert 40 < sum(thinks) < 80
    assert thinks == [p.columns["format"] == "think,answer" for p in many(tmp_path, reasoning=0.3)]
    assert thinks != [p.columns["format"] == "think,answer" for p in many(tmp_path, seed=1, reasoning=0.3)]
    # Whether a row thinks depends on neither the other rows nor the share of the others.
    fewer = [p.columns["format"] == "think,answer" for p in many(tmp_path, reasoning=0.3, limit=50)]
    assert thinks[:50] == fewer
    more = [p.columns["format"] == "think,answer" for p in many(tmp_path, reasoning=0.6)]
    assert all(b for a, b in zip(thinks, more, strict=True) if a)


def test_a_share_of_0_and_1_is_none_and_all(tmp_path):
    assert {p.columns["format"] for p in many(tmp_path, reasoning=0.0)} == {"answer"}
    assert {p.columns["format"] for p in many(tmp_path, reasoning=1.0)} == {"think,answer"}


def test_spans_beyond_their_video_are_cut_to_it_unless_told_otherwise(tmp_path):
    row = {"start": 8, "end": 12}
    (prompt,) = made(tmp_path, row)
    assert prompt.target.spans == ((8, 10),)
    assert prompt.answers[0].text == "<answer> 8.00 to 10.00 </answer>"
    (prompt,) = made(tmp_path, row, trim_spans=False)
    assert prompt.target.spans == ((8, 12),)


def test_several_spans_are_kept_and_the_first_is_demonstrated(tmp_path):
    (prompt,) = made(tmp_path, {"spans": [[5, 6], [1, 20]]})
    assert prompt.target.spans == ((5, 6), (1, 10))
    assert prompt.answers[0].text == "<answer> 5.00 to 6.00 </answer>"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"start": 5, "end": 2}, "5 to 2 s does not end after it starts"),
        ({"start": 5, "end": 5}, "does not end after it starts"),
        ({"start": 10, "end": 12}, "10 to 12 s lies outside its video of 10 s"),
        ({"start": -1, "end": 2}, "lies outside its video"),
        ({"start": float("nan"), "end": 2}, "wanted a finite number as `span: start`, got nan"),
        ({"start": 1, "end": float("inf")}, "wanted a finite number as `span: end`, got inf"),
        ({"start": 1, "end": 2, "duration": float("nan")}, "wanted a finite number as `duration`, got nan"),
        ({"spans": [[1, 2], [3, 3]]}, "3 to 3 s does not end after it starts"),
        ({}, "it has no span"),
    ],
)
def test_a_row_without_a_span_inside_its_video_is_an_error_that_names_it(tmp_path, row, words):
    with pytest.raises(ValueError, match="bad_rows: drop") as caught:
        made(tmp_path, SPAN, row)
    assert "rows.jsonl:2" in str(caught.value)
    assert words in str(caught.value)
    assert "1 row of" in str(caught.value)


def test_bad_rows_are_dropped_and_named_in_the_log(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="mmrl"):
        prompts = made(tmp_path, {"start": 5, "end": 2}, {**SPAN, "id": "good"}, {}, bad_rows="drop")
    assert [prompt.uid for prompt in prompts] == ["good"]
    assert [record.getMessage().split(": ")[0].rpartition(":")[2] for record in caplog.records[:2]] == [
        "1",
        "3",
    ]


def test_unlabelled_rows_stay_where_they_are_wanted(tmp_path):
    labelled, bare = made(tmp_path, SPAN, {}, unlabelled=True)
    assert labelled.answers and not bare.answers
    assert bare.target.spans == ()
    with pytest.raises(ValueError, match="does not end after"):
        made(tmp_path, {"start": 5, "end": 2}, unlabelled=True)


def test_a_missing_or_empty_annotation_file_is_an_error_that_names_it(tmp_path):
    options = {"root": str(tmp_path), "stream": Stream(0)}
    with pytest.raises(ValueError, match="there is no file .*nowhere.jsonl"):
        grounding(path=str(tmp_path / "nowhere.jsonl"), **options)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="empty.jsonl' holds no row"):
        grounding(path=str(tmp_path / "empty.jsonl"), **options)
    with pytest.raises(ValueError, match="holds no row that can be used"):
        made(tmp_path, {"start": 5, "end": 2}, bad_rows="drop")


@pytest.mark.parametrize("video", ["b.mp4", "../rows.jsonl", "/etc/hostname"])
def test_a_video_that_is_missing_or_outside_the_root_names_the_row(tmp_path, video):
    with pytest.raises(RowError, match=r"rows\.jsonl:2: ") as caught:
        made(tmp_path, SPAN, {**SPAN, "video": video})
    assert video in str(caught.value)


def test_two_rows_of_one_id_are_an_error_that_names_both(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: the id 'r' is that of .*rows\.jsonl:1"):
        made(tmp_path, {**SPAN, "id": "r"}, {**SPAN, "id": "r"})


def test_limit_takes_the_first_rows(tmp_path):
    rows = [{**SPAN, "id": str(i)} for i in range(5)]
    assert [prompt.uid for prompt in made(tmp_path, *rows, limit=2)] == ["0", "1"]


def test_without_durations_those_of_the_videos_count_and_videos_are_sampled_as_asked(tmp_path):
    (tmp_path / "v").mkdir()
    shades = torch.arange(16, dtype=torch.uint8)[:, None, None, None] * 15
    write_video(tmp_path / "v" / "a.mp4", shades.expand(-1, 3, 32, 64), 4)
    path = tmp_path / "rows.txt"
    path.write_text("a 1 9##Somebody waves.\n")
    options = {"frames_per_second": 1.0, "min_frames": 2, "max_pixels": 512}
    (prompt,) = grounding(
        path=str(path), root=str(tmp_path / "v"), stream=Stream(0), format="charades_sta", **options
    )
    assert prompt.target.duration == 4
    assert prompt.target.spans == ((1, 4),)
    frames = prompt.media[0].load()
    assert frames.times.tolist() == [0, 1, 2, 3]
    assert frames.pixels.shape == (4, 3, 16, 32)


def test_qvhighlights_rows_carry_their_saliency(tmp_path):
    (tmp_path / "v.mp4").touch()
    row = {"qid": 1, "query": "x", "vid": "v", "duration": 4, "relevant_windows": [[0, 2]]}
    row |= {"relevant_clip_ids": [0], "saliency_scores": [[4, 3, 2]]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (prompt,) = grounding(path=str(path), root=str(tmp_path), stream=Stream(0), format="qvhighlights")
    assert prompt.uid == "1"
    assert prompt.target.saliency == ((4, 3, 2), (0, 0, 0))
