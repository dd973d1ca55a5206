"""Answering: texts, images and videos of any form in, texts or images out."""

from __future__ import annotations

import numpy
import pytest
import torch
from PIL import Image

import mmrl
from mmrl.data.fields import RowError
from mmrl.data.media import MediaError
from mmrl.inference.session import Session
from tests.diffusion import tiny as tiny_pipelines
from tests.support.damaged import valid
from tests.support.toys import ToyGenerate, ToyText
from tests.vision.conftest import checkpoint

__all__ = ["checkpoint"]


@pytest.fixture(scope="module")
def vlm(checkpoint):
    options = {"max_completion_length": 6, "temperature": 0}
    return mmrl.load_engine(checkpoint("qwen2_5_vl"), ["policy.dtype=float64"], **options)


@pytest.fixture(scope="module")
def pixels():
    return numpy.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=numpy.uint8)


@pytest.fixture
def image(pixels, tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    return path


def test_a_model_that_only_answers_is_held_in_the_dtype_of_its_policy(checkpoint):
    session = mmrl.load_engine(checkpoint("qwen2_5_vl"), ["policy.dtype=bfloat16"], max_completion_length=3)
    assert {p.dtype for p in session.engine.policy.module.parameters()} == {torch.bfloat16}
    assert isinstance(session.answer("what fox"), str)


def test_a_path_an_image_and_an_array_are_the_same_image(vlm, image, pixels):
    forms = [image, str(image), Image.open(image), pixels, {"bytes": image.read_bytes()}, image.read_bytes()]
    answers = {vlm.answer("what fox", images=[form]) for form in forms}
    assert len(answers) == 1
    assert answers != {vlm.answer("what fox", images=[255 - pixels])} != {vlm.answer("what fox")}


def test_messages_of_transformers_ask_the_same_as_a_text(vlm, image, pixels):
    wanted = vlm.answer("what fox", images=[image])
    filled = [{"type": "image", "image": pixels}, {"type": "text", "text": "what fox"}]
    path = [{"type": "image", "path": str(image)}, {"type": "text", "text": "what fox"}]
    empty = [{"type": "image"}, {"type": "text", "text": "what fox"}]
    null = [{"type": "image", "text": None}, {"type": "text", "text": "what fox", "image": None}]
    assert vlm.answer([{"role": "user", "content": filled}]) == wanted
    assert vlm.answer([{"role": "user", "content": path}]) == wanted
    assert vlm.answer([{"role": "user", "content": empty}], images=[image]) == wanted
    assert vlm.answer([{"role": "user", "content": null}], images=[image]) == wanted
    assert vlm.answer([{"role": "user", "content": "what fox"}], images=[image]) == wanted
    assert vlm.answer("<image>what fox", images=[image]) == wanted


def test_a_list_of_questions_gives_a_list_of_answers(vlm, image, pixels):
    asked = ["what fox", [{"role": "user", "content": "the quick fox"}], "what"]
    answers = vlm.answer(asked, images=[[image], None, pixels])
    single = [vlm.answer(asked[0], images=image), vlm.answer(asked[1]), vlm.answer(asked[2], images=pixels)]
    assert answers == single and all(isinstance(answer, str) for answer in answers)


def test_a_video_is_seen(vlm, tmp_path, pixels):
    (tmp_path / "a.mp4").write_bytes(valid("a.mp4"))
    answers = {vlm.answer("what fox", videos=[tmp_path / "a.mp4"]), vlm.answer("what fox")}
    assert len(answers) == 2


def test_draws_follow_the_seed_and_the_number_of_questions(checkpoint):
    def said(seed):
        session = mmrl.load_engine(checkpoint("qwen2_5_vl"), ["policy.dtype=float64"], seed=seed)
        assert session.engine.temperature == 1 and session.engine.max_completion_length == 256
        session.engine.max_completion_length = 8
        return [session.answer("the quick fox") for _ in range(2)] + session.answer(["the quick fox"] * 2)

    first = said(0)
    assert first == said(0) != said(1)
    assert len(set(first)) == 4


BLACK = numpy.zeros((28, 28, 3), dtype=numpy.uint8)


@pytest.mark.parametrize(
    ("asked", "images", "error", "message"),
    [
        ("x", ["no.png"], MediaError, "there is no file 'no.png', given as image 1"),
        ("x", ["https://x.org/a.png"], MediaError, "nothing is downloaded; name a local file"),
        ("x", [BLACK[0]], RowError, "wanted a path, a PIL image, an array or a tensor"),
        (
            "x",
            [BLACK + 7.5],
            RowError,
            "wanted (height, width, 3), or of a tensor (3, height, width)",
        ),
        ("<image> x", None, RowError, "the messages have 1 image places, but 0 are given"),
        ("<image> x", [BLACK] * 2, RowError, "the messages have 1 image places, but 2 are given"),
        (3, None, RowError, "wanted a text, messages ({'role': ..., 'content': ...}), or a list of these"),
        (
            [{"role": "robot", "content": "x"}],
            None,
            RowError,
            "wanted system, user, assistant, tool as the role of",
        ),
        (
            [{"role": "user", "content": [{"type": "sound"}]}],
            None,
            RowError,
            "of the types text, image, video and",
        ),
        (["x", "y"], [BLACK], RowError, "a list with the images of each of 2 prompts, got 1"),
        (["x", "y"], BLACK, RowError, "a list with the images of each of 2 prompts, got ndarray"),
    ],
)
def test_what_cannot_be_asked_is_an_error(vlm, asked, images, error, message):
    with pytest.raises(error) as raised:
        vlm.answer(asked, images=images)
    assert message in str(raised.value)


def test_only_a_path_is_a_video(vlm):
    with pytest.raises(RowError, match="wanted a path as video 1 of 'p"):
        vlm.answer("x", videos=[BLACK])


def test_a_file_that_is_no_image_is_named(vlm, tmp_path):
    (tmp_path / "a.png").write_text("words")
    with pytest.raises(ValueError, match=r"cannot decode '.*a\.png'.*wanted an image"):
        vlm.answer("x", images=[tmp_path / "a.png"])


def test_a_flow_model_gives_images(tmp_path):
    options = {"num_inference_steps": 2, "height": 32, "width": 48}
    tiny_pipelines.tiny_sd3(tmp_path)
    session = mmrl.load_engine(tmp_path, ["policy.dtype=float32"], **options)
    image = session.answer("a red cube")
    assert (type(image), image.size, image.mode) == (Image.Image, (48, 32), "RGB")
    pair = session.answer(["a red cube", "a red cube"])
    assert pair[0].tobytes() != pair[1].tobytes() != image.tobytes()
    with pytest.raises(RowError, match="this model reads text only, but image 1 of 'p3' is given"):
        session.answer("a red cube", images=[image])


def test_a_video_model_gives_frames(tmp_path):
    options = {"num_inference_steps": 2, "height": 32, "width": 32, "num_frames": 5}
    tiny_pipelines.tiny_wan(tmp_path)
    session = mmrl.load_engine(tmp_path, ["policy.dtype=float32"], **options)
    assert [frame.size for frame in session.answer("a red cube")] == [(32, 32)] * 5


def test_an_engine_of_any_other_policy_reads_text():
    from mmrl.core.rng import Stream

    with torch.no_grad():
        session = Session(ToyGenerate(ToyText(), stream=Stream()))
    assert isinstance(session.answer("say 1"), str)
    with pytest.raises(RowError, match="this model reads text only"):
        session.answer("say 1", images=["a.png"])
