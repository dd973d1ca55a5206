"""One parser for targets and answers: every target is its own right answer, and no other one is."""

from __future__ import annotations

import random
from itertools import permutations, product

import numpy
import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.answer_text import answer_part
from mmrl.core.answers import number_in, targets_of, words_of
from mmrl.core.choices import choice_in, choices_in, letter_in
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.answers import FormOfData, infer_form, is_right
from mmrl.rewards.text import answer_f1, exact_match
from mmrl.vision.rewards.answers import binary_vqa, short_answer

# Of each set, no target is right where another is wanted.
APART = {
    "text": [
        ("3", "-3", "3%", "0.3", "33", "3/4", "3*4", "3+4", "3-4", "3:4", "34"),
        ("15", "1,5", "1,2,5", "(1,5)"), ("C", "C++", "C#"), ("A", "A+", "A-", "AB", "a cat", "B"),
        ("a<b", "a>b", "a<=b", "a=b", "a!=b"), ("x^2", "x2", "2x", "-x", "x"),
        ("\u0915\u093f", "\u0915\u093e", "\u0915"),
        ("$5", "€5"), ("type A", "type B"), ("10:30", "1030"), ("≤3", "<3"), ("(a+b)*c", "a+(b*c)"),
        ("Zoë", "Zoe"), ("yes", "no"), ("+", "-", "?", "♥"), ("50%", "50"), ("1/2", "2/1", "1 2"),
    ],
    "number": [
        ("3", "-3", "3%", "1/3", "30", "3e5", "3 million"), ("15", "1,5"),
        ("9007199254740993", "9007199254740992"),
        ("1e-12", "2e-12"), ("3 cats", "3 dogs"), ("cow", "cat"), ("10:30", "30", "10"), ("2*3", "3"),
        ("1.2.3", "3"), ("3 and 4", "4", "2 and 4"), ("3 or 4", "4"),
    ],
    "letter": [tuple("ABCDEFGHIJ"), ("A", "A, B", "B"), ("(A)", "(B)"), ("cat", "A", "B"), ("A+", "A")],
    "exact": [("a cat", "cat", "a hat"), ("-3", "3"), ("C", "C++"), ("...", "!"), ("e\u0301", "e")],
    "choice": [("A", "B", "C"), ("red", "blue", "light blue"), ("0", "1", "2")],
}  # fmt: skip
SAME = [
    ("t-shirt", "t shirt"), ("3.0", "3"), ("7", "seven"), ("1,000", "1000"), ("1.5", "1,5"), ("−3", "-3"),
    ("१२", "12"), ("１２", "12"), ("é", "e\u0301"), (r"\frac{1}{2}", "1/2"), ("½", "1/2"), ("x²", "x^2"),
    ("$5", "5"),     ("90°", "90"), ("50 percent", "50%"), ("The Cat.", "cat"), ("U.S.", "US"),
    (r"\text{B}", "b"), ("**B**", "B"),
    (r"\mathrm{cm}", "cm"), (r"30^{\circ}", "30°"), ("don’t", "don't"), ("1'000", "1000"),
]  # fmt: skip
CHOICES = {"A": "red", "B": "blue", "C": "light blue"}


def given(target, text, reward=short_answer, columns=None, **options):
    return reward([Prompt("p", (), target, columns=columns or {})], [Outcome(text=text)], **options)[0]


def shown(text):
    """Write an answer in the ways of models."""
    return [
        text,
        f"<answer>{text}</answer>",
        rf"so \boxed{{{text}}}",
        f"<think>9 or C</think> <answer> {text} </answer>",
    ]


@pytest.mark.parametrize("form", APART)
def test_a_target_is_right_and_another_is_not(form):
    columns = {"choices": list(CHOICES.values())}
    for targets in APART[form]:
        for target in targets:
            for text in shown(target):
                assert given(target, text, form=form, columns=columns) == 1, (target, text)
            assert given(f"<answer> {target} </answer>", target, form=form, columns=columns) == 1, target
            assert given(rf"\boxed{{{target}}}", target, form=form, columns=columns) == 1, target
        for target, other in permutations(targets, 2):
            for text in shown(other):
                assert given(target, text, form=form, columns=columns) == 0, (target, text)


def test_targets_that_are_drawn_are_right_and_others_are_not():
    draw = random.Random(0)
    parts = [
        *"abcXYZ012359",
        "the ",
        " cat",
        "-",
        "+",
        "/",
        "<",
        ".",
        ",",
        "%",
        " ",
        "é",
        "\u0915\u093f",
        "٣",
        "$",
        "^",
    ]
    texts = {"".join(draw.choices(parts, k=draw.randint(1, 6))).strip() for _ in range(200)} - {""}
    for text in texts:
        for form in ("text", "number", "letter", "exact"):
            assert all(
                given(text, answer, form=form) == 1 for answer in (text, f"<answer>{text}</answer>")
            ), text
    numbers = [draw.choice([draw.randint(-99, 99), round(draw.uniform(-9, 9), 2)]) for _ in range(30)]
    for one, other in product(numbers, repeat=2):
        assert given(str(one), f"it is {other}", form="number") == (one == other)
        assert given(one, str(other)) == (one == other)


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_means_the_same_is_right(one, other):
    assert given(one, other) == given(other, rf"\boxed{{{one}}}") == 1


@pytest.mark.parametrize("text", ["", "...", "!?", " ", "<answer></answer>", r"\boxed{}", "<think>A", "—"])
def test_an_answer_without_words_earns_nothing(text):
    for target in ("A", "0", "the", "cat", "None"):
        assert given(target, text) == given(target, text, exact_match) == given(target, text, answer_f1) == 0


@pytest.mark.parametrize("target", [None, "", " ", [], float("nan"), "<answer></answer>", {"a": 1}])
def test_no_target_pays_nothing_and_is_named(target, caplog, monkeypatch):
    monkeypatch.setattr("mmrl.rewards.answers._warned", set())
    for text in ("None", "0", "zero", "nan", ""):
        assert given(target, text) is given(target, text, exact_match) is None
    assert given(target, "<answer>None</answer>", answer_f1) is None
    assert "'short_answer' compares with a right answer, and prompt 'p' has none" in caplog.text


NOT_SAID = {
    "number": {
        "5": "5!|3 to 5|either 3 or 5|not 5|it is not 5|5k|>5|x<5|5+|√5|log 5|5x|5i|5π|0x5|2x5",
        "$5": "€5|£5",
        "None": "0|zero",
        "25 cm^2": "25 m^2|25 cm",
        "2": "twenty-two|no two or three|the one on the left",
    },
    "letter": {
        "A": "not A|the answer is not A|Answer: A and B|A, B|AB|An apple",
        "B": "A or B|both A and B|it isn't B|A and B|neither A nor B|"
        "it is not A or B|all except B|(A) or (B)|A B",
        "C": "vitamin C|A B C",
        "D": "A B C D|A\nB\nC\nD|A/D|rather than D",
    },
    "text": {"5": "5!", "None": "0|zero", "0": "None", "red": "not red|red and blue"},
    "choice": {"red": "not red|it isn't red|red or blue|A or B", "blue": "rather than blue"},
}
SAID = {
    "number": {
        "5": "it is 5|five|five apples|There are 5!|5 cm|−5+10 = 5|I see 2 and 3, so 5|"
        "the five of them|5, not 4|5 (more than 4)",
        "12": "Twelve|１２|१२|1.2e1",
        "21": "twenty-one|it is 21.",
        "-5": "minus five|negative 5|−5|Answer: -5",
        "0": "None.|zero",
        "25": "25 cm^2|25 cm²|The area is 25 m2.",
        "25 cm^2": "25|25 cm²",
        "500": "five hundred|5 hundred",
        "5000": "5k|five thousand|5 000|5,000",
        "1": "one|there is one dog|only one",
        "120": "one hundred and twenty",
    },
    "letter": {
        "B": "B, because A is red|答案是B|选B。|Not A. It is B.|It is not A but B|B!|"
        "the answer is (B)|B\n\nExplanation: A is red.|B (not A)|B rather than A|"
        "Options are A, B and C. Answer: B"
    },
    "choice": {"blue": "not red but blue|B", "red": "A|the red one"},
}


@pytest.mark.parametrize("form", NOT_SAID)
def test_what_denies_or_joins_the_target_earns_nothing(form):
    columns = {"choices": ["red", "blue"]}
    for target, texts in NOT_SAID[form].items():
        for text in texts.split("|"):
            assert given(target, text, form=form, columns=columns) == 0, (target, text)


@pytest.mark.parametrize("form", SAID)
def test_what_says_the_target_in_a_sentence_is_right(form):
    columns = {"choices": ["red", "blue"]}
    for target, texts in SAID[form].items():
        for text in texts.split("|"):
            assert given(target, text, form=form, columns=columns) == 1, (target, text)


def test_targets_of_rows_become_texts():
    assert targets_of(("cat", ["kitty", None])) == ["cat", "kitty"] and targets_of(3.0) == ["3"]
    assert targets_of(numpy.array([1.0, 2.5])) == ["1", "2.5"] and targets_of(numpy.int64(4)) == ["4"]
    assert given(("cat", "kitty"), "Kitty", exact_match) == given(["a", "b"], "b") == given(True, "yes") == 1
    assert given(3.0, "3", exact_match) == given("3.0", "3", exact_match) == 1
    assert given("<answer>Yes</answer>", "yes", binary_vqa) == given(False, "No.", binary_vqa) == 1


def test_the_part_that_counts():
    assert answer_part(r"\boxed{\frac{1}{2}} or \boxed{\text{B}}.") == r"\text{B}"
    assert answer_part("so\n#### 72") == " 72" and answer_part(r"<answer>\boxed{3}</answer>") == "3"
    assert answer_part("<think>1</think> 2") == " 2" and answer_part("<think>1") == ""


def test_numbers_letters_and_choices_are_read():
    read = {
        "1.234,5": 1234.5,
        "1,00,000": 1e5,
        "1½": 1.5,
        "-$5": -5,
        "2 million": 2e6,
        r"1.5\times10^{3}": 1500,
    }
    assert {text: float(number_in(text)) for text in read} == read
    assert [number_in(text) for text in ("2*3", "3-5", "1e999", "no", "9" * 400, "2024-05-01")] == [None] * 6
    letters = {
        "B. A cat sat": "B",
        "I think B": "B",
        "A cat": "",
        "A is right": "A",
        "(c)": "C",
        "Answer: D": "D",
        "A or B": "",
    }
    assert {text: letter_in(text) for text in letters} == letters
    chosen = {
        "it is red": "A",
        "1": "B",
        "(C)": "C",
        "light blue": "C",
        "B. blue": "B",
        "none": "",
        "red or blue": "",
    }
    assert {text: choice_in(text, CHOICES) for text in chosen} == chosen
    assert choices_in({"choices": {"text": ["x"], "label": ["1"]}}) == {"1": "x"}
    assert choices_in({"options": ["A. x", "B. y"]}) == {"A": " x", "B": " y"}
    assert words_of("The dog's 3.50 km, an hour!") == ["dog's", "3.50", "km", "hour"]


def asked(*targets, **columns):
    return [Prompt(str(i), (), target, columns=columns) for i, target in enumerate(targets)]


def test_the_form_is_inferred_from_all_targets():
    assert (
        infer_form(asked("A", "(B)"))[0] == "letter" and infer_form(asked("3", 4.5, "1,000%"))[0] == "number"
    )
    assert infer_form(asked("red", "1", "C", choices=list(CHOICES.values())))[0] == "choice"
    form, sentence = infer_form(asked("3", "cat", r"\frac{1}{2}"))
    assert form == "text" and "with 3 targets, of which 2 are each a number; 1 are formulas" in sentence
    assert "2 are lists inside a text" in infer_form(asked("['red', \"it's\"]", '["a", "b"]', "[1, 2]"))[1]
    assert infer_form(asked(None, object()))[0] is None


def test_rewards_that_leave_the_form_out_take_that_of_the_data():
    pieces = Pieces(Stream())
    pieces.answer_form = FormOfData(asked("A", "B"))
    assert pieces.make("reward", Piece("vision.short_answer")).options == {"form": "letter"}
    assert pieces.make("reward", Piece("vision.short_answer", {"form": "text"})).options == {"form": "text"}
    length = {"name": "cosine_length", "reward": "vision.short_answer", "max_completion_length": 9}
    inner = pieces.make("reward", Piece(length.pop("name"), length)).options["reward"]()
    assert inner.options == {"form": "letter"} and "a single letter" in pieces.answer_form.sentence


def test_formulas_are_compared_by_math_verify():
    pytest.importorskip("math_verify")
    same = [
        ("1/2", "0.5"),
        ("x+y", "y+x"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("1/3", "0.33333"),
        ("no solution", "No solution."),
        ("a<b", "b>a"),
    ]
    for one, other in same:
        assert is_right(rf"\boxed{{{other}}}", one, "math"), (one, other)
    apart = [
        ("1/2", "0.51"),
        ("dog", "god"),
        ("-3", "3"),
        ("a<b", "a>b"),
        ("15", "1,5"),
        ("5 cm", "5 m"),
        ("R", "r"),
        ("(1,2)", "(2,1)"),
        ("C", "C++"),
    ]
    for one, other in apart:
        assert not is_right(other, one, "math") and not is_right(one, other, "math"), (one, other)
        assert is_right(one, one, "math") and is_right(rf"\boxed{{{other}}}", other, "math")


def test_formulas_without_math_verify_name_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    pieces = Pieces(Stream())
    pieces.make("reward", Piece("vision.short_answer", {"form": "number"}))
    pieces.require_packages()
    pieces.make("reward", Piece("vision.short_answer", {"form": "math"}))
    with pytest.raises(ConfigError, match=r"needs the package math_verify, .*pip install 'mmrl\[math\]'"):
        pieces.require_packages()
