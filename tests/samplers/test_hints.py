"""Hints: who gets which one, when, in what group, and what is said where a column has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.cli import main
from mmrl.config.loading import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.data.hints import sentences, tiers, with_hint, without_hint
from mmrl.samplers.hints import WithHints
from mmrl.samplers.uniform import Uniform
from mmrl.training.collect import collect
from mmrl.training.loop import learnable, train
from tests.support.tables import reward_table
from tests.support.toys import SOLUTION, ToyGenerate, ToyText, hinted_prompts, prompts, toy_run

pytestmark = pytest.mark.usefixtures("no_page")


class HelpedBySecond:
    """An engine whose answers are right for p0 and, elsewhere, with the second hint only."""

    notes = ToyGenerate.notes

    def __init__(self, policy) -> None:
        self.policy = policy

    def rollout(self, asked):
        def text(prompt):
            right = prompt.uid == "p0" or prompt.tags.get("hint") == "2"
            return str(prompt.target) if right else str(prompt.target % 5 + 1)

        return tuple(
            replace(self.policy.encode(prompt, Outcome(text=text(prompt))), on_policy=True)
            for prompt in asked
        )


def hinting(folder, *, rounds=4, size=4, hints=(), **changes):
    sampler = [
        {"name": "uniform", "shuffle": False},
        {"name": "with_hints", "hint_column": "hints", **dict(hints)},
    ]
    usual = {
        "data": "tests.support.toys:hinted_prompts",
        "sampler": sampler,
        "group_filter": "varied",
        "rewards": ["tests.support.toys:share_right"],
        "rollout": {
            "num_prompts": 3,
            "num_generations": size,
            "max_rounds": rounds,
            "engine": [f"{__name__}:HelpedBySecond"],
        },
    }
    return toy_run(folder, **{**usual, **changes})


# ---- texts


def test_sentences_are_split_after_their_ends():
    assert sentences(SOLUTION) == ["First add.", "Then divide.", "Then round.", "Done."]
    assert sentences("0.5 is half\nof 1.") == ["0.5 is half", "of 1."]


@pytest.mark.parametrize(
    ("value", "cuts", "wanted"),
    [
        (SOLUTION, 2, ["First add. Then divide.", SOLUTION]),
        (SOLUTION, 1, [SOLUTION]),
        ("One. Two.", 4, ["One.", "One. Two."]),  # no hint twice
        (["weak", "", "strong"], 4, ["weak", "strong"]),
        ([], 4, []),
        (None, 4, []),
        ("", 4, []),
    ],
)
def test_a_column_gives_hints_from_weak_to_strong(value, cuts, wanted):
    assert tiers(value, cuts) == wanted


def test_a_hint_is_added_and_taken_off_again():
    prompt = prompts()[0]
    hinted = with_hint(prompt, "{hint} 1 + 1", tag="3")
    assert hinted.text == "say 1\n\n\nHint: {hint} 1 + 1"
    assert hinted.uid == prompt.uid and hinted.tags == {"hint": "3"}
    assert without_hint(hinted) == prompt and without_hint(prompt) is prompt


# ---- failed prompts in further rounds of a step


def test_a_failed_prompt_gets_hints_until_one_helps(tmp_path):
    run = hinting(tmp_path)
    seen = collect(run).seen
    # p0 is solved by all and p1 has no hints, so both are replaced; p2 fails, and its second hint helps.
    hints = [row for row, uid in enumerate(seen.uids) if uid == "p2" and seen.ids["hint"][row, 0]]
    assert seen.uids.count("p2") == 4 + 2 and len(hints) == 2
    assert seen.at_end("share_right")[hints].tolist() == [0.0, 1.0]
    assert run.method.sampler.pop_metrics()["hints/solved"] >= 1


def test_the_success_takes_the_place_of_the_first_row(tmp_path):
    advantage = ["first_success", "total", {"name": "group_normalize", "eps": 1e-6}]
    run = hinting(tmp_path, advantage=advantage, rounds=3, size=8)
    collection = collect(run)
    _, credit, batch = learnable(run, collection)
    rows = [i for i, uid in enumerate(credit.uids) if uid == "p2"]
    learned = credit.learn[rows, 0]
    # EX-47: eight failures become one success and seven failures.
    values = credit.values[rows, 0, 0][learned]
    torch.testing.assert_close(
        values.sort(descending=True)[0],
        torch.tensor([2.474867, *[-0.353552] * 7], dtype=torch.float64),
        rtol=0,
        atol=2e-6,
    )
    assert len(batch) == int(credit.learn[:, 0].sum())


def test_all_hints_may_be_tried_in_one_round(tmp_path):
    run = hinting(tmp_path, rounds=2, hints={"hints_per_round": 3, "num_hinted": 2})
    seen = collect(run).seen
    assert seen.uids.count("p2") == 4 + 3 * 2
    assert len(set(seen.ids["hint"][[uid == "p2" for uid in seen.uids], 0].tolist())) == 4  # none, 1, 2, 3


def test_the_first_steps_are_without_hints(tmp_path):
    run = hinting(tmp_path, hints={"start": 5})
    assert "hint" not in collect(run).seen.ids
    run.stream.step = 5
    assert "hint" in collect(run).seen.ids


@pytest.mark.parametrize(
    "changes", [{"rounds": 1}, {"group_filter": "keep_all"}, {"rounds": 1, "hints": {"start": 50}}]
)
def test_a_run_that_never_asks_again_is_an_error(tmp_path, changes):
    with pytest.raises(
        ConfigError, match=r"none came in 10 steps with failures; set `rollout.max_rounds` to"
    ):
        train(hinting(tmp_path, max_steps=12, **changes))


def test_a_run_with_hints_trains_and_resumes(tmp_path):
    for steps in (2, 4):
        train(hinting(tmp_path / "parts", max_steps=steps, save_steps=2))
    train(hinting(tmp_path / "whole", max_steps=4, save_steps=2))
    tables = [
        (tmp_path / name / "checkpoint-4" / "model" / "model.safetensors").read_bytes()
        for name in ("parts", "whole")
    ]
    assert tables[0] == tables[1]


# ---- failed prompts for which hints are written


def test_hints_to_write_are_asked_for_with_an_answer_that_failed():
    data = hinted_prompts(num=1)
    sampler = WithHints(
        Uniform(data, stream=Stream()), stream=Stream(), written=3, hints_per_round=2, num_hinted=2
    )
    assert sampler.draw(1, 2) == [data[0]] * 2
    encoded = [ToyText().encode(data[0], Outcome(text=text)) for text in ("5", "4")]
    sampler.observe(tuple(encoded), reward_table([0.0, 0.0], group=["p0", "p0"]))
    sampler.stream.round = 1
    asked = sampler.draw(1, 2)
    assert [prompt.tags for prompt in asked] == [{"wanted_hint": n} for n in ("1", "1", "2", "2")]
    assert {prompt.columns["failed_attempt"] for prompt in asked} == {"5"}
    assert {prompt.text for prompt in asked} == {data[0].text}
    assert [prompt.tags["wanted_hint"] for prompt in sampler.draw(1, 2)] == ["3", "3"]
    assert sampler.pop_metrics()["hints/prompts"] == 1.0


@pytest.mark.parametrize(
    "options",
    [{}, {"hint_column": "hints", "written": 2}, {"written": 2, "when": "next_time"}],
)
def test_hints_come_from_a_column_or_are_written_in_the_next_round(options):
    data = hinted_prompts()
    with pytest.raises(ConfigError, match=r"set `written` to their number instead, with `when: next_round`"):
        WithHints(Uniform(data, stream=Stream()), stream=Stream(), train_prompts=data, **options)


# ---- failed prompts when they are drawn again


def later(**options):
    stream = Stream()
    data = hinted_prompts(num=2)
    return WithHints(
        Uniform(data[:1], stream=stream),
        stream=stream,
        train_prompts=data,
        hint_column="hints",
        when="next_time",
        **options,
    )


def rounds_of(sampler, rewards):
    """Draw one prompt after the other, answer it with a reward, and list the hints that it showed."""
    shown = []
    for reward in rewards:
        (prompt,) = sampler.draw(1, 1)
        shown.append(prompt.tags.get("hint", ""))
        sampler.observe((), reward_table([reward], group=[prompt.uid]))
        sampler.stream.step += 1
    return shown


def test_a_prompt_that_failed_is_shown_its_next_hint_when_it_is_drawn_again():
    assert rounds_of(later(), [0.0, 0.0, 1.0, 0.0, 0.0]) == ["", "1", "2", "", "1"]
    assert rounds_of(later(), [0.0] * 6) == ["", "1", "2", "3", "3", "3"]  # the last hint stays
    assert rounds_of(later(threshold=0.5), [0.5, 1.0, 0.5]) == ["", "1", ""]
    assert rounds_of(later(start=2), [0.0] * 4) == ["", "", "", "1"]


def test_an_answer_without_a_reward_is_no_failure():
    assert rounds_of(later(), [None, None]) == ["", ""]


def test_the_next_hints_are_saved():
    sampler, other = later(), later()
    rounds_of(sampler, [0.0, 0.0])
    assert sampler.level == {"p0": 2}
    other.load_state_dict(sampler.state_dict())
    assert rounds_of(other, [1.0]) == ["2"]


# ---- bad input


@pytest.mark.parametrize("name", ["with_hints", "with_difficulty_hints"])
def test_a_missing_column_is_known_before_a_weight_is_loaded(tmp_path, monkeypatch, name):
    monkeypatch.setattr("tests.support.toys.ToyText.__init__", lambda self: pytest.fail("a policy was made"))
    sampler = ["uniform", {"name": name, "hint_column": "tips"}]
    with pytest.raises(
        ConfigError, match=r"no prompt has a hint in the column 'tips'; the data have hints, sol"
    ):
        toy_run(tmp_path, data="tests.support.toys:hinted_prompts", sampler=sampler)


def test_a_missing_column_ends_the_command_with_one_line(tmp_path, capsys):
    from mmrl.config.schema import Config, as_yaml, parse
    from tests.support.toys import plan

    sampler = ["uniform", {"name": "with_hints", "hint_column": "tips"}]
    (tmp_path / "run.yaml").write_text(as_yaml(parse(plan(tmp_path / "out", sampler=sampler), Config)))
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .splitlines()[-1]
        .endswith("in the column 'tips'; the data have wanted")
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hint_column": "number"}, r"'number' of prompt 'p0' must be a text or a list of texts, .* not 3"),
        ({"hint_column": "hints", "hint_template": "Hint!"}, r"'hint_template' must contain {hint}, not be"),
    ],
)
def test_columns_and_templates_that_cannot_be_used_are_refused(options, words):
    data = [replace(prompt, columns={**prompt.columns, "number": 3}) for prompt in hinted_prompts()]
    with pytest.raises(ConfigError, match=words):
        WithHints(Uniform(data, stream=Stream()), stream=Stream(), train_prompts=data, **options)
