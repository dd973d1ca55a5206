"""Samples: which are chosen, and what can be looked through."""

from __future__ import annotations

import math
import re

import pyarrow
import pytest
import torch
from pyarrow import parquet

from mmrl.config.schema import ConfigError
from mmrl.core.types import Outcome
from mmrl.reporting.html.charts import diverging
from mmrl.reporting.html.samples import ROWS, STEPS, Sample, read_samples, samples_section, spread_over
from mmrl.reporting.thumbnails import of_outcome, strip


def write(folder, step, rows, part=""):
    """Write completions as a run does; a row changes what is usual."""
    usual = {
        "uid": "p",
        "prompt": "say",
        "completion": "word",
        "on_policy": True,
        "length": 2,
        "advantage": 0.0,
    }
    names = dict.fromkeys([*usual, *(name for row in rows for name in row)])
    columns = {name: [{**usual, **row}.get(name) for row in rows] for name in names}
    (folder / "completions").mkdir(exist_ok=True)
    path = folder / "completions" / f"completions_{step:06d}{part}.parquet"
    parquet.write_table(pyarrow.table(columns), path)


def sample(reward=1.0, **more) -> Sample:
    return Sample(**{"step": 0, "prompt": "say", "completion": "word", "reward": reward, "advantage": 0.0,
                     "length": 2, "rewards": {"right": reward}, **more})  # fmt: skip


def test_things_are_chosen_at_equal_distances_with_both_ends():
    assert spread_over(range(11), 3) == [0, 5, 10]
    assert spread_over(range(3), 6) == [0, 1, 2] and spread_over([], 3) == []


def test_the_first_and_the_last_collection_and_the_best_and_the_worst_are_shown(tmp_path):
    for step in range(20):
        write(tmp_path, step, [{"reward": float(i), "reward/right": float(i)} for i in range(2 * ROWS)])
    found = read_samples(tmp_path, {})
    steps = sorted({one.step for one in found})
    assert len(steps) == STEPS and (steps[0], steps[-1]) == (0, 19)
    first = [one.reward for one in found if one.step == 0]
    assert len(first) == ROWS and (first[0], first[-1]) == (2 * ROWS - 1, 0.0)
    rewards = [one.reward for one in found]
    assert rewards == sorted(rewards, reverse=True)


def test_parts_of_several_processes_are_one_collection(tmp_path):
    write(tmp_path, 0, [{"reward": 1.0}], "-0")
    write(tmp_path, 0, [{"reward": 2.0}], "-1")
    assert [(one.step, one.reward) for one in read_samples(tmp_path, {})] == [(0, 2.0), (0, 1.0)]


def test_rewards_without_their_sum_are_added_up(tmp_path):
    write(tmp_path, 0, [{"reward/right": 1.0, "reward/short": -2.0}, {"reward/right": math.nan}])
    write(
        tmp_path,
        0,
        [{"reward/right": 1.0, "reward/short": -2.0}, {"reward/right": 0.5, "reward/short": math.nan}],
    )
    # 1 - .5 * 2 = 0; of the second only one is known.
    assert [one.reward for one in read_samples(tmp_path, {"short": 0.5})] == [0.5, 0.0]


@pytest.mark.parametrize("place", ["footer", "pages"])
def test_a_damaged_file_is_named_and_left_out(tmp_path, caplog, place):
    for step in range(3):
        write(tmp_path, step, [{"reward": float(step)}, {"reward": 9.0}])
    bad = tmp_path / "completions" / "completions_000001.parquet"
    data = bad.read_bytes()
    bad.write_bytes(data[:40] if place == "footer" else data[:4] + b"\xff" * 300 + data[304:])
    assert [(one.step, one.reward) for one in read_samples(tmp_path, {})] == [
        (0, 9.0), (2, 9.0), (2, 2.0), (0, 0.0),
    ]  # fmt: skip
    (said,) = caplog.messages
    assert said.startswith(f"'{bad}' cannot be read and is left out: ")


def test_collections_with_images_come_first(tmp_path):
    for step in range(4):
        pictures = {"made": b"jpeg"} if step == 2 else {}
        write(tmp_path, step, [{"reward": 1.0, **pictures}, {"reward": 2.0}])
    assert [(one.step, one.reward) for one in read_samples(tmp_path, {})] == [(2, 1.0)]


def test_a_run_without_completions_has_no_samples(tmp_path):
    assert read_samples(tmp_path, {}) == [] and samples_section([]) == ""


def test_samples_can_be_sifted_by_step_reward_and_words():
    text = samples_section([
        sample(1.0, rewards={"right": 1.0, "cost <": -0.5}, completion="<b>one</b>", advantage=0.5),
        sample(math.nan, step=4, rewards={"right": math.nan, "cost <": 2.0}, on_policy=False),
    ])  # fmt: skip
    assert re.findall(r"<article [^>]*?data-(step=\d+ data-reward=\w+ data-advantage=[\d.]+)", text) == [
        "step=0 data-reward=1 data-advantage=0.5",
        "step=4 data-reward=nan data-advantage=0",
    ]
    assert re.findall(r"data-r1=(\S+?)>", text) == ["-0.5", "2"]
    assert "<option value=r1>cost &lt;</option>" in text and "<option value=4>5</option>" in text
    assert "&lt;b&gt;one&lt;/b&gt;" in text and "not sampled by the policy" in text
    assert "2 samples of 2 collections" in text


def test_a_sample_shows_what_was_wanted(tmp_path):
    write(tmp_path, 0, [{"reward": 1.0, "target": "<b>a cat</b>"}, {"reward": 0.0}])
    found = read_samples(tmp_path, {})
    assert [one.target for one in found] == ["<b>a cat</b>", ""]
    text = samples_section(found)
    assert text.count("class=target") == 1 and "&lt;b&gt;a cat&lt;/b&gt;" in text


def test_long_texts_are_cut_and_one_reward_is_not_told_twice():
    text = samples_section([sample(completion="x" * 5000)])
    assert "3500 letters more" in text and "right" not in text.partition("<article")[2]


def test_what_was_asked_about_is_written_once():
    picture = strip(torch.full((3, 3, 9, 9), 200, dtype=torch.uint8))
    made = of_outcome(Outcome(image=torch.zeros(3, 9, 9, dtype=torch.uint8)))
    text = samples_section([sample(seen=picture), sample(seen=picture, made=made), sample()])
    assert text.count("background-image:url(data:image/jpeg;base64,") == 1
    assert text.count('class="seen s') == 2
    # Three squares of 72 pixels, two apart.
    assert "aspect-ratio:220/72" in text
    assert text.count("<img ") == 1


def test_a_sound_is_played_and_written_once(tmp_path):
    write(
        tmp_path, 3, [{"heard": b"RIFF", "prompt": "</audio><script>", "reward": float(i)} for i in range(3)]
    )
    text = samples_section(read_samples(tmp_path, {}))
    assert text.count("<audio ") == 3 and text.count('src="data:audio/wav;base64,UklGRg=="') == 1
    assert text.index("id=h0") < text.index("data-same=h0") and text.count("data-same=h0") == 2
    assert "&lt;/audio&gt;&lt;script&gt;" in text and "<script>" not in text


def test_the_mark_is_the_advantage_and_not_the_reward():
    # The best reward of a group in which all are as good has no advantage.
    text = samples_section([sample(9.0), sample(2.0, advantage=1.5), sample(3.0, advantage=-0.75)])
    assert re.findall(r"--mark:(#\w+)", text) == [diverging(a, 1.5) for a in (0.0, 1.5, -0.75)]
    legend = text[text.index('<p class="note scale">') :].partition("</p>")[0]
    assert "-1.50" in legend and "+1.50" in legend
    ends = f"{diverging(-1, 1)},{diverging(0, 1)},{diverging(1, 1)}"
    assert f"linear-gradient(to right,{ends})" in legend and "grey at 0" in legend
    assert "scale" not in samples_section([sample(1.0)]), "without an advantage no legend"


def test_a_conversation_is_shown_with_what_tools_showed(tmp_path):
    talk = "<b>call</b> <image: 4 tokens> fox"
    picture = strip(torch.zeros(1, 3, 9, 9, dtype=torch.uint8))
    row = {"reward": 1.0, "reward/right": 1.0, "conversation": talk, "shown": [picture]}
    write(tmp_path, 0, [row])
    text = samples_section(read_samples(tmp_path, {}))
    assert text.count('alt="image from a tool"') == 1 and "<b>call" not in text
    assert "4 tokens" not in text
    write(tmp_path, 0, [{**row, "shown": ["text"]}])
    with pytest.raises(ConfigError, match="'shown' must be a JPEG"):
        read_samples(tmp_path, {})
