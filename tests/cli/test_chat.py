"""`mmrl chat`: turns with history, images and videos, through a pipe."""

from __future__ import annotations

import pytest
from PIL import Image

from mmrl import load_engine
from tests.cli.conftest import IMAGES, QUICK


@pytest.fixture(scope="module")
def session(model):
    return load_engine(model, QUICK)


def turn(role, *content):
    return {"role": role, "content": [{"type": "text", "text": c} if type(c) is str else c for c in content]}


def test_every_question_is_asked_with_the_turns_before_it(mmrl, model, session):
    code, lines, err = mmrl("chat", model, *QUICK, stdin="the quick fox\n\nbrown 0123\n/exit\nmore\n")
    first = session.answer("the quick fox")
    turns = [turn("user", "the quick fox"), {"role": "assistant", "content": first}]
    second = session.answer([*turns, turn("user", "brown 0123")])
    assert (code, lines) == (0, f"{first}\n{second}".splitlines())
    assert second != session.answer("brown 0123"), "the turns before must matter"
    assert "/reset: forget everything" in err


def test_reset_forgets_and_the_end_of_the_input_leaves(mmrl, model, session):
    code, lines, _ = mmrl("chat", model, *QUICK, stdin="the quick fox\n/reset\nbrown 0123")
    wanted = [session.answer("the quick fox"), session.answer("brown 0123")]
    assert (code, lines) == (0, "\n".join(wanted).splitlines())


def test_an_image_is_shown_with_the_next_question(mmrl, model, session, image):
    code, lines, _ = mmrl("chat", model, *QUICK, stdin=f"/image {image}\nwhat fox\nthe\n")
    asked = turn("user", {"type": "image", "path": str(image)}, "what fox")
    first = session.answer([asked])
    second = session.answer([asked, {"role": "assistant", "content": first}, turn("user", "the")])
    assert (code, lines) == (0, f"{first}\n{second}".splitlines())
    assert first != session.answer("what fox")


def test_a_mistake_is_told_and_the_conversation_goes_on(mmrl, model, session, image):
    image.with_name("b.png").write_text("words")
    stdin = f"/image no.png\n/image {image.with_name('b.png')}\n/imgae x\n/image\nthe quick fox\n"
    code, lines, err = mmrl("chat", model, *QUICK, stdin=stdin)
    assert (code, lines) == (0, session.answer("the quick fox").splitlines())
    assert "error: there is no file 'no.png' (--image)" in err and "wanted an image as PNG" in err
    assert "error: there is no command '/imgae x'; there are /image PATH" in err
    assert err.count("error: ") == 4


def test_a_flow_model_writes_each_image(mmrl, flow_model, tmp_path):
    folder = tmp_path / "images"
    (folder).mkdir()
    (folder / "00000.png").write_text("somebody's")
    code, lines, _ = mmrl("chat", flow_model, *IMAGES, "--output", folder, stdin="a red cube\na ball\n")
    assert (code, lines) == (0, [str(folder / "00001.png"), str(folder / "00002.png")])
    assert Image.open(lines[1]).size == (32, 32) and (folder / "00000.png").read_text() == "somebody's"


def test_a_wrong_model_is_an_error(mmrl):
    code, lines, err = mmrl("chat", "no_such_model", stdin="x\n")
    assert (code, lines) == (2, []) and "there is no file or folder 'no_such_model'" in err
