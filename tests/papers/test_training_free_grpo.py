"""Experiences before prompts: how the list grows from compared answers, is kept short, saved and refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mmrl.config.loading import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Trajectory
from mmrl.papers.training_free_grpo import (
    AnsweredGroup,
    ByPolicy,
    WithExperience,
    before_question,
    changes_in,
    contrast,
)
from mmrl.runtime.checkpoint import checkpoints, read_state
from mmrl.samplers.uniform import Uniform
from mmrl.training.collect import collect
from mmrl.training.loop import train
from tests.support.tables import reward_table
from tests.support.toys import prompts, toy_run

pytestmark = pytest.mark.usefixtures("no_page")


def rename(experiences, groups):
    """An update that keeps one experience, which names the prompts that were compared last."""
    text = " ".join(group.prompt.uid for group in groups)
    return [{"update": name, "text": text} for name in experiences] or [{"add": text}]


def nonsense(experiences, groups):
    return [{"delete": "7"}]


def learning(update=contrast, **options):
    return WithExperience(
        Uniform(prompts(), stream=Stream(), shuffle=False), experience_update=update, **options
    )


def answered(sampler, rewards):
    """Ask one prompt, and give it as many answers as there are rewards."""
    (*_, prompt) = sampler.draw(1, 1)
    rows = tuple(
        Trajectory(prompt, prompt.uid, (Outcome(text=f"answer {i}"),), None, 1) for i in range(len(rewards))
    )
    sampler.observe(rows, reward_table(rewards, group=[prompt.uid] * len(rewards)))
    return prompt


def test_experiences_stand_before_the_question_and_nothing_without_them():
    sampler = learning()
    assert answered(sampler, [0.0, 1.0]).text == "say 1"
    assert sampler.draw(1, 2)[0].text == (
        "Experiences from earlier attempts:\n"
        "1. Asked: say 1\n'answer 1' earned 1, 'answer 0' earned 0.\n\n\nsay 2"
    )


def test_a_system_message_stays_first():
    prompt = replace(prompts()[0], messages=(Message("system", (Part("be kind"),)), *prompts()[0].messages))
    assert before_question(prompt, Part("know: ")).text == "be kind\nknow: \nsay 1"


@pytest.mark.parametrize("rewards", [[0.5, 0.5], [1.0], [None, 1.0], [None, None]])
def test_groups_without_a_difference_teach_nothing(rewards):
    sampler = learning(nonsense)
    answered(sampler, rewards)
    assert sampler.experiences == {}


def test_the_oldest_experiences_go_first_and_no_id_comes_twice():
    sampler = learning(max_experiences=2)
    for _ in range(4):
        answered(sampler, [0.0, 1.0])
    assert list(sampler.experiences) == ["2", "3"]
    assert sampler.experiences["2"].startswith("Asked: say 3")
    assert sampler.pop_metrics() == {"experiences": 2.0}


def test_experiences_are_changed_and_deleted():
    sampler = learning(rename)
    for _ in range(3):
        answered(sampler, [0.0, 1.0])
    assert sampler.experiences == {"0": "p2"}
    sampler.update = lambda experiences, groups: [{"delete": "0"}, {"add": "new"}]
    answered(sampler, [0.0, 1.0])
    assert sampler.experiences == {"1": "new"}


@pytest.mark.parametrize("proposal", [nonsense, lambda e, g: "add this", lambda e, g: [{"add": 3}]])
def test_proposals_of_another_form_are_refused(proposal):
    with pytest.raises(ValueError, match=r"an experience update must return a list of {\"add\": text}"):
        answered(learning(proposal), [0.0, 1.0])


def rows(*texts):
    return tuple(Trajectory(prompts()[0], "p0", (Outcome(text=text),), None, 1) for text in texts)


def test_answers_on_another_process_are_an_error_where_nobody_tells_them():
    table = reward_table([0.0, 1.0], group=["p0", "p0"], process=[0, 1])
    with pytest.raises(ConfigError, match="only some of them are on this"):
        learning().observe(rows("bad"), table)
    learning(None).observe(rows("bad"), table)


def test_answers_of_another_process_are_told():
    sampler = learning()
    uid = sampler.draw(1, 2)[0].uid
    sampler.connect(None, lambda value: [["bad"], ["good"]] if value == ["bad"] else [value, "unlike"])
    sampler.observe(rows("bad"), reward_table([1.0, 0.0], group=[uid] * 2, process=[1, 0]))
    assert list(sampler.experiences.values()) == ["Asked: say 1\n'good' earned 1, 'bad' earned 0."]


def asking(replies, experiences=None, **options):
    """Ask `by_policy` about two groups, and give it replies; return its changes, itself and what it asked."""
    asked = []

    def ask(prompts):
        asked.extend(prompts)
        return tuple(
            Trajectory(prompt, prompt.uid, (Outcome(text=replies[prompt.uid.partition("#")[2]]),), None, 1)
            for prompt in prompts
        )

    piece = ByPolicy(**options)
    piece.connect(ask, lambda value: [value])
    groups = [AnsweredGroup(prompts()[i], [("good", 1.0), ("fair", 0.5), ("bad", 0.0)]) for i in (0, 3)]
    return piece(experiences or {}, groups), piece, asked


def test_the_policy_is_asked_for_rules_and_then_for_changes():
    replies = {
        "rules": "- look [twice]\n\n2. count\n* third\nfourth",
        "changes": 'Fine [sure].\n[{"add": "look [twice]"}, '
        '{"update": "7", "text": "count"}, {"delete": "9"}]',
    }
    changes, piece, asked = asking(replies, {"7": "guess"}, max_answers=2)
    assert changes == [{"add": "look [twice]"}, {"update": "7", "text": "count"}], "9 does not exist"
    assert piece.pop_metrics() == {"experiences/changes": 2.0, "experiences/unread": 0.0}
    assert [prompt.uid for prompt in asked] == ["p0#rules", "p3#rules", "p0#changes"]
    assert (
        asked[0].text.startswith("say 1\n\n\nBelow are answers") and "at most 3 short rules" in asked[0].text
    )
    assert "1. Score 1: good\n2. Score 0: bad\n" in asked[0].text, "the best and the worst"
    rules = ["look [twice]", "count", "third"] * 2
    listed = "\n".join(f"{i}. {rule}" for i, rule in enumerate(rules, 1))
    assert f"7: guess\n\nThese are proposed:\n{listed}\n" in asked[2].text


@pytest.mark.parametrize("reply", ["none", "[1, 2]", '{"add": "x"}', "[" * 5000, "[{"])
def test_changes_that_cannot_be_read_are_counted(reply):
    changes, piece, _ = asking({"rules": "a", "changes": reply})
    assert changes == [] and piece.pop_metrics() == {"experiences/changes": 0.0, "experiences/unread": 1.0}
    assert asking({"rules": " \n", "changes": reply})[0] == []


def test_an_experience_is_deleted_once():
    gone = '{"delete": "0"}'
    text = f'[{gone}, {gone}, {{"update": "0", "text": "x"}}, {{"add": " "}}, {{"add": "y", "id": 1}}]'
    assert changes_in(text, {"0": "a"}) == [{"delete": "0"}]


def test_evaluations_are_asked_with_the_experiences(tmp_path):
    path = tmp_path / "known.json"
    path.write_text('["look twice"]')
    run = toy_run(
        tmp_path / "run",
        sampler=["uniform", {"name": "with_experience", "path": str(path)}],
        evaluation={"data": {"name": "tests.support.toys:prompts", "num": 2}, "num_generations": 2},
    )
    texts = [row.prompt.text for row in run.evaluator.measure(intervals=False).rollouts]
    assert len(texts) == 4 and all("1. look twice\n\n\nsay" in text for text in texts)


def test_contrast_notes_a_question_once():
    group = AnsweredGroup(prompts()[0], [("good", 1.0), ("bad", 0.0)])
    (proposal,) = contrast({}, [group])
    assert contrast({"0": proposal["add"]}, [group]) == []


def test_a_list_in_a_file_is_used_and_written(tmp_path):
    path, output = tmp_path / "known.json", tmp_path / "grown.json"
    path.write_text('["look twice"]')
    sampler = learning(path=str(path), output=str(output))
    assert answered(sampler, [0.0, 1.0]).text.startswith(
        "Experiences from earlier attempts:\n1. look twice\n"
    )
    grown = json.loads(output.read_text())
    assert grown[0] == "look twice" and len(grown) == 2
    assert list(learning(path=str(output)).experiences.values()) == grown


@pytest.mark.parametrize(
    ("text", "words"), [("{", "cannot read the experiences"), ('{"a": 1}', "a JSON list of")]
)
def test_a_file_of_another_form_is_refused(tmp_path, text, words):
    (tmp_path / "known.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        learning(path=str(tmp_path / "known.json"))


def test_a_run_learns_experiences_only_and_resumes_exactly(tmp_path):
    def run(name, steps):
        return toy_run(
            tmp_path / name,
            sampler=["uniform", {"name": "with_experience", "experience_update": f"{__name__}:rename"}],
            learn={"num_iterations": 0},
            max_steps=steps,
            save_steps=2,
        )

    for steps in (2, 4):
        train(run("parts", steps))
    train(run("whole", 4))
    states = [
        read_state(checkpoints(tmp_path / name)[0])["pieces"]["sampler[1]"] for name in ("parts", "whole")
    ]
    assert states[0] == states[1] and len(states[0]["experiences"]) == 1
    asked = collect(run("parts", 4)).rollouts[0].prompt
    assert asked.text.startswith("say"), "a new run begins with an empty list"
