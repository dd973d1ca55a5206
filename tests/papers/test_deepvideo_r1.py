"""Prompts that are asked again: noisy frames where they were easy, hints where they were hard."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Outcome, Part
from mmrl.papers.deepvideo_r1 import DifficultyAugmentation
from mmrl.samplers.uniform import Uniform
from mmrl.training.collect import collect
from mmrl.vision.media.prompts import add_gaussian_noise
from tests.support.remembering import AUGMENTED
from tests.support.resuming import EVERYTHING, assert_alike, killed, resumed
from tests.support.tables import reward_table
from tests.support.toys import prompts, toy_run
from tests.vision import tiny

SOLUTION = "The fox runs. It sees a dog! Does it jump? It jumps.\nSo the answer is 3. Or 4."  # six sentences


def clips(num=8, **columns):
    return [replace(tiny.ask(f"v{i}", tiny.clip(seed=i), "when"), columns=columns) for i in range(num)]


def sampler(data=None, **options):
    stream = Stream(0)
    return DifficultyAugmentation(
        Uniform(clips() if data is None else data, stream=stream, shuffle=False), stream=stream, **options
    )


def names(drawn):
    return list(dict.fromkeys(prompt.uid for prompt in drawn))


def observed(piece, rewards):
    """Observe two answers to every prompt, with the same mean as the reward."""
    uids = [uid for uid in rewards for _ in range(2)]
    values = [value + away for value in rewards.values() for away in (-0.1, 0.1)]
    piece.observe((), reward_table({"right": values}, group=uids))


def step(piece, rewards, num=4, number=0):
    """Take the two rounds of a step; `rewards` are those of the plain prompts."""
    piece.stream.step, piece.stream.round = number, 0
    plain = piece.draw(num, 2)
    observed(piece, dict(zip(names(plain), rewards, strict=True)))
    piece.stream.round = 1
    again = piece.draw(num - len(names(plain)), 2)
    observed(piece, dict.fromkeys(names(again), 0.0))
    return plain, again


# ---- whom it asks again


def test_half_of_a_step_is_asked_plainly_and_again_by_difficulty():
    piece = sampler(clips(solution=SOLUTION), hint_column="solution")
    plain, fresh = step(piece, [0.5, 0.5])
    assert names(plain) == ["v0", "v1"] and len(plain) == 4
    assert names(fresh) == ["v2", "v3"]  # nothing to compare with yet: new ones take the place
    assert piece.recent == pytest.approx([0.5, 0.5, 0.0, 0.0])
    plain, again = step(piece, [1.0, 0.0], number=1)  # 1/4 - 1 = -3/4, 1/4 - 0 = 1/4
    assert names(plain) == ["v4", "v5"]
    assert [prompt.uid for prompt in again] == ["v4#noise"] * 2 + ["v5#hint"] * 2
    assert again[0] is again[1]  # one noise for all answers to it


def test_noise_and_hint_grow_with_the_difficulty():
    data = clips(solution=SOLUTION)
    piece = sampler(data, hint_column="solution", max_reward=2.0)
    piece.waiting, piece.difficulty = {"a": data[0]}, {}
    piece.stream.round = 1

    def strength(difficulty):
        piece.difficulty = {data[0].uid: difficulty}
        piece._changed(data[0], SOLUTION)
        return {kind: values[0] for kind, values in piece.drawn.items() if values}

    for difficulty, kind, wanted in [
        (-0.5, "noise", 0.125),  # 0.5 * 0.5 / 2
        (-3.0, "noise", 0.5),  # clipped
        (0.5, "hint", 1 / 6),  # 0.5 * 0.25 * 6 = 0.75 sentences
        (1.5, "hint", 2 / 6),  # 0.5 * 0.75 * 6 = 2.25
        (9.0, "hint", 3 / 6),
    ]:
        assert strength(difficulty) == {kind: pytest.approx(wanted)}
        piece.pop_metrics()
    for difficulty in (0.0, 0.2):  # 0.5 * 0.1 * 6 = 0.3 sentences
        assert strength(difficulty) == {}


def test_a_hint_is_the_beginning_of_the_solution_after_the_question():
    piece = sampler(clips(solution=SOLUTION), hint_column="solution", hint_template="({hint})")
    step(piece, [1.0, 1.0])
    _, again = step(piece, [0.0, 0.5], number=1)
    # The window is 1, 1, 0, 0: a half, of which a quarter of six sentences is 1.5, rounded to 2.
    assert again[0].uid == "v4#hint"
    assert again[0].text == "when\n\n(The fox runs. It sees a dog!)"
    assert again[0].media[0].name == "clip4"


def test_without_a_column_hard_prompts_make_room_for_new_ones():
    piece = sampler()
    step(piece, [0.5, 0.5])
    _, again = step(piece, [1.0, 0.0], number=1)
    assert names(again) == ["v4#noise", "v6"]


def test_answers_to_changed_prompts_do_not_enter_the_window():
    piece = sampler(window=3)
    step(piece, [0.5, 0.5])
    step(piece, [1.0, 0.0], number=1)
    # v6, which is new, got 0 in `step`; so did the changed v4.
    assert piece.recent == pytest.approx([1.0, 0.0, 0.0])


def test_demonstrations_and_unknown_rewards_do_not_count():
    piece = sampler()
    piece.draw(4, 3)
    table = reward_table({"right": [0.2, 0.4, None, 1.0, None]}, group=["v0"] * 4 + ["v1"],
                         on_policy=[True, True, True, False, True])  # fmt: skip
    piece.observe((), table)
    assert piece.recent == pytest.approx([0.3])


# ---- the noise


def test_the_noise_has_the_deviation_that_it_says(generator):
    frames = Frames(torch.full((4, 3, 64, 64), 128, dtype=torch.uint8), torch.zeros(4))
    away = add_gaussian_noise(frames, generator, 0.25).pixels.double() - 128
    assert away.std().item() == pytest.approx(0.25 * 127.5, rel=0.02) and abs(away.mean()) < 0.5
    assert not torch.equal(away[0], away[1])  # each frame has its own
    bright = Frames(torch.full((1, 3, 64, 64), 250, dtype=torch.uint8), torch.zeros(1))
    assert add_gaussian_noise(bright, generator, 0.5).pixels.max() == 255
    assert torch.equal(add_gaussian_noise(frames, generator, 0.0).pixels, frames.pixels)


def test_noise_is_drawn_by_step_and_prompt_whenever_frames_are_loaded():
    def noisy(number):
        piece = sampler(clips(num=4))
        step(piece, [0.5, 0.5])
        _, again = step(piece, [1.0, 1.0], number=number)
        piece.stream.step, piece.stream.round = 99, 0  # the report loads them later
        assert names(again) == ["v0#noise", "v1#noise"]
        return [prompt.media[0].load().pixels for prompt in (again[0], again[2])]

    first, other = noisy(1)
    assert torch.equal(first, noisy(1)[0]) and not torch.equal(first, noisy(2)[0])
    clean = clips()[0].media[0].load().pixels
    assert not torch.equal(first, clean) and first.shape == clean.shape
    away = first.double() - clean.double()
    assert not torch.equal(other.double() - clips()[1].media[0].load().pixels.double(), away)


def test_a_prompt_without_media_cannot_be_made_harder():
    piece = sampler([tiny.ask(f"v{i}", "the fox") for i in range(8)])
    step(piece, [0.5, 0.5])
    _, again = step(piece, [1.0, 1.0], number=1)
    assert names(again) == ["v6", "v7"]


# ---- memory, metrics, mistakes


def filmed(*, num: int = 8):
    """Show every prompt of the toys a clip, and give each a solution."""
    asked = prompts(num=num)
    for i, prompt in enumerate(asked):
        (message,) = prompt.messages
        parts = (*message.parts, Part(media=tiny.clip(seed=i)))
        columns = {**prompt.columns, "solution": SOLUTION}
        asked[i] = replace(prompt, messages=(replace(message, parts=parts),), columns=columns)
    return asked


SAVED = {**AUGMENTED, "max_steps": 4, "save_steps": 2}


@pytest.fixture
def no_page(monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)


def test_a_killed_run_goes_on_exactly(tmp_path, no_page):
    whole = resumed(tmp_path / "whole", **SAVED)
    killed(tmp_path / "cut", at=3, **SAVED)
    assert_alike(resumed(tmp_path / "cut", **SAVED), whole)
    records = whole.journal.read()
    for kind in ("noise", "hint"):
        assert sum(record.get(f"augmentation/{kind}_prompts", 0) for record in records) > 0


def test_changed_prompts_are_groups_of_their_own(tmp_path, no_page):
    run = toy_run(tmp_path, **{**EVERYTHING, **AUGMENTED, "group_filter": "keep_all"})
    run.tick(0)
    collect(run)
    run.tick(1)
    table = collect(run).table
    counts = Counter(table.uids)
    assert sum(uid.endswith(("#noise", "#hint")) for uid in counts) > 0
    assert set(counts.values()) == {3} and len(table.group.unique()) == len(counts) == 3


def test_the_policy_explains_the_right_answer_of_hard_prompts():
    asked = []
    texts = ["<think>One. Two! Three? Four.</think> wrong", "<think>Look. Count. Add. Say.</think> right"]

    def ask(prompts):
        asked.extend(prompts)
        outcomes = [Outcome(text=text, end=1) for text in texts]
        return [SimpleNamespace(outcomes=(outcome,)) for outcome in outcomes]

    def reward(prompts, outcomes):
        assert [prompt.uid for prompt in prompts] == ["v5", "v5"]  # as they are without the answer
        return [float("right" in outcome.text) for outcome in outcomes]

    data = [replace(prompt, target=7) for prompt in clips()]
    piece = sampler(data, num_thoughts=2, reward=lambda: reward, max_hint=1.0)
    piece.connect(ask, lambda value: [value])
    step(piece, [0.5, 0.5])
    assert asked == []  # nobody is hard before there is something to compare with
    _, again = step(piece, [1.0, -0.25], number=1)  # difficulty 1/4 + 1/4: half of four sentences
    assert [prompt.uid for prompt in asked] == ["v5#thought"] * 2
    assert asked[0].text.endswith("The right answer is 7. Explain step by step how to find it.")
    assert again[-1].uid == "v5#hint" and again[-1].text.endswith("\nHint: Look. Count.")


def test_a_run_asks_its_own_engine_for_thoughts(tmp_path, no_page):
    thoughts = {"hint_column": "", "num_thoughts": 2, "reward": "tests.support.toys:share_right"}
    thoughts |= {"max_hint": 1.0, "max_reward": 0.01}  # an answer of a toy is one sentence
    sampler = ["uniform", AUGMENTED["sampler"][1] | thoughts]
    run = toy_run(tmp_path, **{**EVERYTHING, **AUGMENTED, "sampler": sampler, "group_filter": "keep_all"})
    hinted = []
    for number in range(3):
        run.tick(number)
        hinted += [row.prompt for row in collect(run).rollouts if row.prompt.uid.endswith("#hint")]
    assert hinted and all("Hint: " in prompt.text for prompt in hinted)


def test_sampled_thoughts_need_a_reward_and_an_engine():
    with pytest.raises(ConfigError, match="needs a `reward` that chooses"):
        sampler(num_thoughts=2)
    piece = sampler(num_thoughts=2, reward=lambda: None)
    step(piece, [0.5, 0.5])
    with pytest.raises(ConfigError, match="was not given by `connect`"):
        step(piece, [1.0, 0.0], number=1)


def test_the_window_is_saved(tmp_path):
    one, other = sampler(), sampler()
    step(one, [0.9, 0.1])
    other.load_state_dict(one.state_dict())
    other.sampler.load_state_dict(one.sampler.state_dict())
    for piece in (one, other):
        piece.drawn = {"noise": [], "hint": []}
    assert [names(part) for part in step(one, [0.7, 0.2], number=1)] == [
        names(part) for part in step(other, [0.7, 0.2], number=1)
    ]
    assert one.pop_metrics() == other.pop_metrics() and one.recent == other.recent


def test_it_reports_how_many_were_changed_and_how_much():
    piece = sampler(clips(solution=SOLUTION), hint_column="solution")
    step(piece, [0.5, 0.5])
    assert set(piece.pop_metrics().values()) == {0.0}
    step(piece, [1.0, 0.0], number=1)
    told = piece.pop_metrics()
    assert told == {
        "augmentation/noise_prompts": 1.0,
        "augmentation/noise_mean": pytest.approx(0.375),  # 0.5 * 3/4
        "augmentation/hint_prompts": 1.0,
        "augmentation/hint_mean": pytest.approx(1 / 6),  # 0.5 / 4 * 6 = 0.75 sentences
    }
    assert not any(piece.pop_metrics().values())
    assert all(map(math.isfinite, told.values()))


def test_one_round_is_too_few():
    piece = sampler()
    piece.draw(4, 2)
    piece.stream.step = 1
    with pytest.raises(ConfigError, match=r"needs `rollout.max_rounds` and `rollout.num_prompts` of 2"):
        piece.draw(4, 2)
    with pytest.raises(ConfigError, match=r"num_prompts` of 2"):
        sampler().draw(1, 2)


def test_a_column_that_is_missing_is_named():
    piece = sampler(clips(solution=SOLUTION), hint_column="solutoin")
    with pytest.raises(ConfigError, match="no prompt of this step has a column 'solutoin'"):
        piece.draw(4, 2)
    with pytest.raises(ConfigError, match=r"'hint_template' must contain \{hint\}"):
        sampler(hint_template="Hint")
