"""A second role that writes hints: what it reads, which hints are shown, what its rows are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmrl.config.schema import ConfigError
from mmrl.data.hints import wanting_hint
from mmrl.papers.hill import WithHinter, usable_hint
from mmrl.training.collect import collect
from mmrl.training.loop import learnable
from tests.support.playing import Answering
from tests.support.remembering import of_sampler
from tests.support.resuming import EVERYTHING
from tests.support.toys import ToyText, prompts, toy_run


def said(prompt):
    """Write a hint that can be used for p0, and none for p1; answer with what was read."""
    if prompt.tags["role"] == "hinter":
        return "So.\n<hint>Count <image> again.</hint>" if prompt.uid.startswith("p0") else "no hint"
    return prompt.text


def rollout(entries, **options):
    inner = Answering(ToyText(), said)
    engine = WithHinter(inner, **options)
    return engine.rollout(entries), inner, engine


def entries():
    plain = [replace(prompt, columns={"solution": f"It is {i}."}) for i, prompt in enumerate(prompts(num=3))]
    asked = [
        wanting_hint(plain[i], f"<b>wrong {i}</b>", tag=tag) for i, tag in ((0, "1"), (0, "2"), (1, "1"))
    ]
    return plain, [p for prompt in asked for p in (prompt, prompt)] + [plain[2]]


def test_the_hinter_reads_the_question_a_failed_answer_and_the_solution():
    plain, asked = entries()
    _, inner, _ = rollout(asked, solution_column="solution")
    first = inner.rounds[0]
    assert [prompt.uid for prompt in first] == ["p0#hinter/1", "p0#hinter/2", "p1#hinter/1"]
    for part in ("say 1", "< b>wrong 0< /b>", "It is 0."):
        assert part in first[0].text
    assert first[0].tags == {"role": "hinter"} and first[0].columns == plain[0].columns
    _, inner, _ = rollout(asked)
    assert "It is" not in inner.rounds[0][0].text and "Solution" not in inner.rounds[0][0].text


def test_answers_read_the_hint_and_hints_are_rows_of_the_group():
    plain, asked = entries()
    rows, _, _ = rollout(asked)
    answers, hints = rows[:-3], rows[-3:]
    # The hint for p1 cannot be used, so that nothing answers it.
    assert [row.prompt.uid for row in answers] == ["p0"] * 4 + ["p2"]
    assert [row.outcomes[-1].text for row in answers] == ["say 1\n\n\nHint: Count < image> again."] * 4 + [
        "say 3"
    ]
    assert [row.prompt.tags.get("hint") for row in answers] == ["1", "1", "2", "2", None]
    assert answers[0].prompt.columns == plain[0].columns  # no column that the data do not have
    assert {row.outcomes[-1].tags["role"] for row in answers} == {"reasoner"}
    assert [(row.prompt.uid, row.group) for row in hints] == [("p0", "p0"), ("p0", "p0"), ("p1", "p1")]
    assert [row.outcomes[-1].tags["wrote"] for row in hints] == ["1", "2", "1"]
    assert [row.outcomes[-1].tags["role"] for row in hints] == ["hinter"] * 3
    assert [row.outcomes[-1].recorded for row in hints] == [{"hint_gate": 0.0}] * 2 + [{"hint_gate": -0.2}]
    assert not any("hint" in {**row.prompt.tags, **row.outcomes[-1].tags} for row in hints)


def test_without_failed_prompts_nothing_is_written():
    rows, inner, _ = rollout(prompts(num=2))
    assert len(inner.rounds) == 1 and [row.prompt.tags for row in rows] == [{"role": "reasoner"}] * 2


@pytest.mark.parametrize(
    ("text", "target", "hint"),
    [
        ("<hint>Look again.</hint>", "7", "Look again."),
        ("<think><hint>a</hint></think><hint> b </hint>", None, "b"),
        ("<HINT>first</HINT> <hint>last</hint>", "x", "last"),
        ("Look again.", "7", ""),
        ("<hint> </hint>", "7", ""),
        ("<hint>Look again.", "7", ""),
        ("<hint>There are 7 rows, add them.</hint>", "7", "There are 7 rows, add them."),
        ("<hint>It equals 7.</hint>", "7", ""),
        ("<hint>It is 70 at most.</hint>", "7", "It is 70 at most."),
        ("<hint>x = 7</hint>", 7, ""),
        ("<hint>Think of a Giraffe.</hint>", "giraffe", ""),
        ("<hint>Think of a neck.</hint>", "giraffe", "Think of a neck."),
        ("<hint>any</hint>", [1, 2], "any"),
    ],
)
def test_a_hint_stands_between_its_tags_and_keeps_the_answer(text, target, hint):
    assert usable_hint(text, target) == hint


def test_a_template_has_to_show_the_answer_that_failed():
    with pytest.raises(ConfigError, match="does not read 'attempt', which it has to show"):
        rollout([], template="{{ question }} <hint></hint>")
    with pytest.raises(ConfigError, match="must ask for <hint>"):
        rollout([], template="{{ question }} {{ attempt }}")


def test_hints_and_answers_are_learned_each_from_their_own_kind(tmp_path):
    run = toy_run(tmp_path, **{**EVERYTHING, **of_sampler("hints, written")})
    for step in range(10):
        run.stream.step = step
        collection = collect(run)
        _, credit, _ = learnable(run, collection)
        wrote = credit.ids["wrote"][:, 0] != 0 if "wrote" in credit.ids else credit.group < 0
        worth = credit.values[wrote, 0, 0]
        if len(worth) and (worth != 0).any():
            break
    else:
        pytest.fail("no hint was paid")
    for group in credit.group[wrote].unique():
        rows = wrote & (credit.group == group)
        assert float(credit.values[rows, 0, 0].sum()) == pytest.approx(0.0, abs=1e-9)  # of hints alone
        assert bool(credit.learn[rows, 0].all())
