"""What the files of methods say of themselves: papers, what differs, and whose reading it is."""

from __future__ import annotations

from pathlib import Path

from mmrl.reporting.methods import (
    ASKED_FOR,
    DIFFERS,
    Method,
    all_methods,
    named_in,
    readings,
    sentences,
    tables,
)

COMMENT = (
    "X-PO (arXiv 2501.00001): what it does, as (arXiv 2402.03300) has it. The factor is our reading. "
    "Differs from GRPO: chain: a factor; no KL. Our readings: the width; that of `y`. `z` names the column."
)


def method(comment):
    return Method(Path("methods/grpo/x_po.yaml"), comment, {})


def test_what_a_comment_says_is_told_apart():
    found = method(COMMENT)
    assert (found.name, found.family) == ("x_po", "grpo")
    assert found.papers == ["2501.00001", "2402.03300"]
    assert found.differs == "chain: a factor; no KL. `z` names the column."
    assert found.readings == ["The factor is our reading.", "Our readings: the width; that of `y`."]
    other = method("Y-PO: one. Our reading: two. Differs from GRPO: no KL.")
    assert other.readings == ["Our reading: two."]
    assert method("Y-PO: as it stands. Differs from GRPO: no KL.").readings == []


def test_sentences_end_before_capital_letters():
    assert sentences("One of 0.5, or 1.\nTwo, e.g. this! `a` is three.") == [
        "One of 0.5, or 1.",
        "Two, e.g. this!",
        "`a` is three.",
    ]
    assert readings("We read. Ours is our\nreading of it. Done.") == ["Ours is our reading of it."]


def test_pieces_are_found_where_their_kind_is_expected():
    raw = {
        "advantage": ["total", {"name": "clip", "of": "total"}],
        "objective": {"name": "policy_gradient", "surrogate": "clip"},
        "references": {"ref": "frozen"},
        "rewards": [{"name": "exact_match"}],
    }
    named = set(named_in(raw, ""))
    assert {("advantage", "clip"), ("surrogate", "clip"), ("reference", "frozen")} <= named
    assert ("reward", "exact_match") in named and ("advantage", "policy_gradient") not in named


def test_every_method_has_a_family_and_says_what_differs():
    assert {"grpo", "flow", "preference", "grounding"} <= {found.family for found in all_methods()}
    for found in all_methods():
        assert len(found.differs) > 5, f"{found.path}: add a comment '# {DIFFERS}...' at its head"
        assert found.pieces(), f"{found.path} names no piece; name its `advantage` or `objective`"


def test_the_reading_of_a_piece_belongs_to_the_methods_that_name_it():
    replay = next(found for found in all_methods() if found.name == "skywork_r1v2")
    assert "with_replay" in [entry.full_name for entry in replay.pieces_read_by_us()]


def test_methods_that_people_ask_for_stand_first_and_the_others_by_family():
    first, *rest = tables().items()
    assert [method.name for method in first[1]] == list(ASKED_FOR)
    assert [title for title, _ in rest] == ["flow", "grounding", "grpo", "preference"]
    listed = [method.name for methods in tables().values() for method in methods]
    assert sorted(listed) == sorted(method.name for method in all_methods())
    assert all(method.family == "flow" for methods in tables("flow").values() for method in methods)
