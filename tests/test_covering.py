"""The covering of families by `make test`."""

from __future__ import annotations

from tests.support.covering import left_out

FAMILIES = ["llava", "qwen2_5_vl", "gemma3", "smolvlm", "glm46v"]


def items(functions, options=("a", "b")):
    return [
        ("file", name, family, (name, family, option))
        for name in functions
        for family in FAMILIES
        for option in options
    ]


def test_one_family_is_taken_with_all_options_and_every_family_in_one_function_at_least():
    listed = items(["f", "g"])
    kept = {item for *_, item in listed} - left_out(listed)
    assert {(name, option) for name, family, option in kept if family == "qwen2_5_vl"} == {
        (name, option) for name in "fg" for option in "ab"
    }
    others = [(name, family) for name, family, _ in kept if family != "qwen2_5_vl"]
    assert len(others) == 4 and {family for _, family in others} == set(FAMILIES) - {"qwen2_5_vl"}
    assert {name for name, _ in others} == {"f", "g"}


def test_a_file_of_one_function_keeps_all_families_and_one_of_few_families_stays_whole():
    listed = items(["f"])
    assert {family for *_, item in listed if item not in left_out(listed) for family in [item[1]]} == set(
        FAMILIES
    )
    few = [one for one in items(["f"]) if one[2] in FAMILIES[:3]]
    assert not left_out(few)
