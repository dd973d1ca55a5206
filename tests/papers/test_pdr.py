"""Answers from drafts: what is asked, in which rounds, which rows there are, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.config.loading import ConfigError
from mmrl.core.rng import Stream
from mmrl.papers.pdr import WithDrafts, budgets, most_agreed
from mmrl.vision.engines.generate import Generate
from tests.vision import tiny

FAMILY = "qwen2_5_vl"


@pytest.fixture
def made(exact):
    """Wrap an engine, and list what it is asked; each answer may be replaced by a text."""

    def make(says=None, purpose="train", **options):
        stream = Stream(0, purpose=purpose)
        inner = Generate(exact(FAMILY), stream=stream, max_completion_length=6)
        wrapped = WithDrafts(inner, stream=stream, **options)
        asked, rollout = [], inner.rollout

        def asking(prompts):
            asked.append(list(prompts))
            return tuple(
                row if says is None else tiny_answer(row, says(row.prompt, i))
                for i, row in enumerate(rollout(prompts))
            )

        inner.rollout = asking
        return wrapped, asked

    return make


def tiny_answer(row, text):
    return replace(row, outcomes=(replace(row.outcomes[-1], text=text),))


def entries(num=2, each=3):
    return [tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(num) for _ in range(each)]


def text_of(prompt):
    return prompt.messages[-1].parts[-1].text


def test_the_worked_budgets():
    calls = [[(100, 1000)] * 8, [(100 + 8 * 200, 300)], [(400, 1000)]]
    assert budgets(calls) == (12_200, 4_500)


def test_agreement_comes_before_likelihood_and_place():
    texts = ["a", "B", "c", "b ", "", "c"]
    assert most_agreed(texts, [-1, -3, -2, -2.5, 0, -2]) == [2, 5, 3, 1, 0]
    assert most_agreed(["", " "], [0, 0]) == []


def test_drafts_are_shared_and_answers_read_the_best_of_them(made):
    says = lambda prompt, i: ["<think>x</think> red", "blue", "Red", "<|im_end|>"][i % 4]
    engine, asked = made(says, rounds=(4,), keep=3)
    prompts = entries()
    rows = engine.rollout(prompts)
    assert [len(prompts) for prompts in asked] == [8, 6]
    first, second = asked[1][0], asked[1][3]
    assert text_of(asked[0][0]) == "what" and text_of(first).count("\n") > 3
    notes = text_of(first).split("wrong:\n")[1].split("\n\n")[0]
    assert sorted(line[3:] for line in notes.splitlines()[:2]) == ["Red", "red"]
    assert "x" not in notes and "<|im_end|>" not in text_of(second)
    assert [row.prompt.uid for row in rows] == [row.group for row in rows] == ["p0"] * 3 + ["p1"] * 3
    assert all(text_of(row.prompt) == "what" for row in rows)
    assert {(o.tags["role"], o.tags["round"]) for row in rows for o in row.outcomes} == {("refine", "1")}
    assert all("episode" not in row.outcomes[-1].tags for row in rows)
    # Answers to one prompt read the same, so that they share its keys and values.
    assert len({row.steps.prompt.uid for row in rows}) == 2


def test_rows_are_those_that_the_policy_learns_from(made):
    engine, _ = made(rounds=(2,), learn=("draft", "refine"))
    rows = engine.rollout(entries())
    roles = [row.outcomes[-1].tags["role"] for row in rows]
    assert roles == ["refine"] * 6 + ["draft"] * 4
    batch = engine.policy.collate(rows)
    with torch.no_grad():
        logp = engine.policy(batch).logp
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=2e-5)
    recorded = rows[0].outcomes[-1].recorded
    drafts = [row for row in rows[6:] if row.prompt.uid == "p0"]
    lengths = [len(row.steps.prompt.ids) + row.length for row in (*drafts, rows[0])]
    assert recorded == {"tokens_total": sum(lengths), "tokens_sequential": max(lengths[:2]) + lengths[2]}


def test_sequential_refinement_is_an_episode_of_rounds(made):
    engine, asked = made(rounds=(1, 1), distil="last", shared=False, learn=("draft", "refine"))
    rows = engine.rollout(entries(num=1, each=2))
    assert [len(prompts) for prompts in asked] == [2, 2, 2]
    tags = [row.outcomes[-1].tags for row in rows]
    assert [(t["episode"], t["turn"], t["role"]) for t in tags] == [
        ("0.0", "4", "refine"), ("0.1", "4", "refine"),
        ("0.0", "0", "draft"), ("0.0", "2", "draft"), ("0.1", "0", "draft"), ("0.1", "2", "draft"),
    ]  # fmt: skip
    engine.stream.round = 1  # where a group is asked again in a step, its episodes are others
    again = {row.outcomes[-1].tags["episode"] for row in engine.rollout(entries(num=1, each=2))}
    assert again == {"1.0", "1.1"}
    second = [row for row in rows if row.outcomes[-1].tags["turn"] == "2"]
    draft = next(row for row in rows if row.outcomes[-1].tags["turn"] == "0")
    assert draft.outcomes[-1].text.strip()[:3] in text_of(asked[1][0])
    assert second[0].outcomes[-1].tags["changed"] == "yes" and "changed" not in draft.outcomes[-1].tags


def test_the_policy_writes_a_summary(made):
    says = lambda prompt, i: "agreed: red" if "distil" in prompt.uid else f"draft {i}"
    engine, asked = made(says, rounds=(3, 2), distil="summary", learn=("draft", "distil", "refine"))
    rows = engine.rollout(entries(num=1))
    assert [len(prompts) for prompts in asked] == [3, 1, 2, 1, 3]
    assert "1. draft 0\n2. draft 1\n3. draft 2" in text_of(asked[1][0])
    assert "wrong:\nagreed: red\n" in text_of(asked[2][0]) and "draft" not in text_of(asked[4][0])
    assert [row.outcomes[-1].tags["role"] for row in rows[3:]] == [
        *["draft"] * 3, "distil", *["draft"] * 2, "distil",
    ]  # fmt: skip


def test_notes_have_a_limit_and_drafts_without_an_answer_are_left_out(made):
    says = lambda prompt, i: ["<answer>red fox</answer>", "no answer", "<answer>blue</answer>"][i % 3]
    engine, asked = made(says, rounds=(3,), keep=3, tag="answer")
    engine.rollout(entries(num=1))
    assert "1. red fox\n2. blue" in text_of(asked[1][0]).replace("1. blue\n2. red fox", "1. red fox\n2. blue")
    tokens = lambda text: len(engine.policy.prompt_encoder.tokenizer(text)["input_ids"])
    limit = max(tokens("1. red fox"), tokens("1. blue"))
    engine.max_workspace_tokens = limit
    assert engine._within(["red fox", "blue"]) == "1. red fox"
    engine.max_workspace_tokens = 2
    assert tokens(engine._within(["red fox", "blue"])) <= 2
    silent, asked = made(lambda prompt, i: "none", rounds=(2,), tag="answer")
    silent.rollout(entries(num=1))
    assert text_of(asked[1][0]) == "what"


def test_random_drafts_are_drawn_by_prompt_and_round(made):
    says = lambda prompt, i: f"draft {i % 8}"
    picked = []
    for _ in range(2):
        engine, asked = made(says, rounds=(8,), distil="random_k", keep=3)
        engine.rollout(entries(num=3))
        picked.append([text_of(prompt) for prompt in asked[1]])
    assert picked[0] == picked[1] and picked[0][0] != picked[0][6]
    assert picked[0][0].count("draft ") == 3


def test_evaluations_get_an_answer_for_every_entry_with_drafts_of_its_own(made):
    engine, asked = made(purpose="evaluate", rounds=(2,), learn=("draft", "refine"))
    prompts = entries()
    rows = engine.rollout(prompts)
    assert [row.prompt.uid for row in rows] == [prompt.uid for prompt in prompts] and len(asked[0]) == 12
    assert all(row.outcomes[-1].tags["role"] == "refine" for row in rows)
    assert all("episode" not in row.outcomes[-1].tags for row in rows)


def test_drafts_that_agree_are_the_answer_where_nothing_is_learned(made):
    # p0 agrees in the first round, p1 in the second, p2 never; q has one answer only
    def says(prompt, i):
        first, letter = "draft0" in prompt.uid, prompt.uid[:2]
        same = letter == "p0" or (letter == "p1" and not first)
        word = "Red " if i % 2 else "red"
        if letter == "p3":
            return f"<answer>{i}</answer>" if i % 2 else "none"
        return f"<answer>{word if same else i}</answer>"

    options = {"rounds": (2, 2), "tag": "answer", "stop_early": True}
    engine, asked = made(says, "evaluate", **options)
    prompts = entries(4, 1)
    rows = engine.rollout(prompts)
    assert [[prompt.uid[:2] for prompt in ask] for ask in asked] == [
        ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"],
        ["p1", "p1", "p2", "p2", "p3", "p3"],
        ["p2", "p3"],
    ]
    tags = [row.outcomes[-1].tags for row in rows]
    assert [(t["role"], t["round"]) for t in tags] == [
        ("draft", "0"), ("draft", "1"), ("refine", "2"), ("refine", "2"),
    ]  # fmt: skip
    assert [row.prompt.uid for row in rows] == [prompt.uid for prompt in prompts]
    first = rows[0]
    other = engine.engine.rollout(asked[0][:2])
    likely = max(other, key=lambda row: float(row.notes["logp"].mean()))
    assert first.steps.ids.tolist() == likely.steps.ids.tolist()
    lengths = [len(row.steps.prompt.ids) + row.length for row in other]
    spent = {"tokens_total": sum(lengths), "tokens_sequential": max(lengths)}
    assert first.outcomes[-1].recorded == spent
    trained, asked = made(says, **options)
    trained.rollout(prompts)
    assert list(map(len, asked)) == [8, 8, 4], "a group of equal answers teaches nothing"


def test_sequential_drafts_stop_where_one_repeats_the_last(made):
    texts = {"draft0": "red", "draft1": "blue", "draft2": "Blue", "draft3": "green"}
    says = lambda prompt, i: texts.get(prompt.uid.rpartition("/")[2], "x")
    options = {"rounds": (1, 1, 1, 1), "distil": "last", "stop_early": True}
    engine, asked = made(says, "evaluate", **options)
    (row,) = engine.rollout(entries(1, 1))
    assert len(asked) == 3 and row.outcomes[-1].tags["role"] == "draft"
    assert row.outcomes[-1].text in ("blue", "Blue")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"template": "notes"}, "must contain {workspace}"), ({"learn": ("draft",)}, "must name `refine`")],
)
def test_what_cannot_work_is_refused(made, options, message):
    with pytest.raises(ConfigError, match=message):
        made(**options)
