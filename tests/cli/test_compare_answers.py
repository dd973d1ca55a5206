"""`mmrl compare-answers`: both are asked the same; without gradio an error names the extra."""

from __future__ import annotations

import sys

import pytest

from mmrl import load_engine
from mmrl.cli.compare_answers import ask_both, page
from tests.cli.conftest import QUICK


def test_both_are_asked_the_same_with_the_same_draws(model, image):
    exact = ["policy.dtype=float64"]
    sessions = [load_engine(model, exact, max_completion_length=8, seed=seed) for seed in (0, 0, 1)]
    ask = ask_both(sessions)
    first, second, other = ask("the quick fox")
    assert first.text == second.text != other.text
    shown = ask("the quick fox", str(image))
    wanted = load_engine(model, exact, max_completion_length=8, seed=0)
    asked = [wanted.answer("the quick fox"), wanted.answer("the quick fox", [image])]
    assert asked == [first.text, shown[0].text]


def test_without_gradio_the_error_names_the_extra(mmrl, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    code, _, err = mmrl("compare-answers", model, model, *QUICK)
    assert code == 2 and err == "error: `mmrl compare-answers` needs gradio; install mmrl[ui]\n"


def test_the_page_is_laid_out_and_asks_both(model):
    gradio = pytest.importorskip("gradio")
    sessions = [load_engine(model, QUICK) for _ in range(2)]
    blocks = page(gradio, ask_both(sessions), ["a", "b"])
    (shown, *_) = [block.fn for block in blocks.fns.values()]
    answer = load_engine(model, QUICK).answer("the quick fox")
    assert shown("the quick fox", None, None) == [answer, [], answer, []]
