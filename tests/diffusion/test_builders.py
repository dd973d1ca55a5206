"""Captioned images, the tiny flow model and the contrastive model come out as what others read."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image, ImageDraw

from examples.image_rl.easy_vqa_captions import EasyVqaCaptions, crop_around_shape, facts
from examples.tiny_clip import CaptionedImages, TinyClip, augmented, contrastive_loss
from mmrl.core.rng import Stream
from mmrl.data.text_files import captions
from mmrl.diffusion.builders.tiny_flow_model import TinyFlowModel, word_tokenizer
from mmrl.diffusion.datasets.prompts import images, prompts

# ---- easy_vqa_captions


def test_facts_are_what_answers_say_and_nothing_that_they_deny():
    told = facts(
        [
            ["what color is the triangle?", "teal", 0],
            ["is a circle present?", "no", 0],
            ["is there not a red shape?", "yes", 0],
            ["does the image not contain a rectangle?", "no", 1],
            ["is there a blue shape?", "yes", 1],
            ["what shape is present?", "circle", 2],
            ["is the shape brown?", "no", 2],
        ]
    )
    # Picture 2 has a shape, and no colour but one that it has not.
    assert told == {0: ("triangle", "teal"), 1: ("rectangle", "blue")}


def test_around_is_centred_where_it_fits():
    picture = torch.full((3, 20, 20), 250, dtype=torch.uint8)
    picture[:, 8:12, 2:4] = 0
    # The middle lies at (3, 10): a square of 8 would begin at (-1, 6).
    assert crop_around_shape(picture, 8) == (0, 6, 8, 14)


@pytest.fixture(scope="module")
def data_set(tmp_path_factory):
    """The layout of easy-VQA, with one circle of each of three colours a split."""
    folder = tmp_path_factory.mktemp("easy_vqa")
    for split in ("train", "test"):
        (folder / split / "images").mkdir(parents=True)
        asked = []
        for number, colour in enumerate(("red", "blue", "black")):
            image = Image.new("RGB", (64, 64), (240, 240, 250))
            ImageDraw.Draw(image).ellipse((30, 20, 50, 40), fill=colour)
            image.save(folder / split / "images" / f"{number}.png")
            asked.append(["what is the color of the circle?", colour, number])
        asked.append(["what shape is present?", "triangle", 3])
        (folder / split / "questions.json").write_text(json.dumps(asked))
    return folder


@pytest.fixture(scope="module")
def captioned(data_set, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return folder, EasyVqaCaptions(source=str(data_set), side=16).build(folder)


def test_captioned_images_are_read_by_both_data_sets(captioned):
    folder, counts = captioned
    assert counts == {"train_images": 3, "test_images": 3, "captions": 3}
    found = images(path=str(folder / "train.jsonl"), root=str(folder))
    assert [prompt.text for prompt in found] == ["a red circle", "a blue circle", "a black circle"]
    assert found[0].answers[0].image.shape == (3, 16, 16)
    # The shape lies in the middle, and the background around it.
    assert found[0].answers[0].image[:, 8, 8].tolist() == [255, 0, 0]
    assert found[0].answers[0].image[:, 0, 0].tolist() == [240, 240, 250]
    asked = prompts(path=str(folder / "prompts.jsonl"))
    assert [prompt.uid for prompt in asked] == ["a black circle", "a blue circle", "a red circle"]
    assert json.loads((folder / "manifest.json").read_text())["licence"] == "MIT"


def test_a_folder_that_is_not_easy_vqa_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not hold a split of easy-VQA"):
        EasyVqaCaptions(source=str(tmp_path)).build(tmp_path / "out")


# ---- tiny_flow_model


def test_word_tokenizer_reads_words_as_one_token_each():
    tokenizer = word_tokenizer(["a red circle", "a teal triangle"], 8)
    ids = tokenizer("A teal circle").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<start>", "a", "teal", "circle", "<end>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("a cat").input_ids)[2] == "<unknown>"
    assert len(tokenizer) == 3 + 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("p.txt", "a red circle\n\na blue square\n"),
        ("p.prompts", "a red circle\na blue square\n"),
        ("p.jsonl", '{"prompt": "a red circle"}\n{"caption": "a blue square"}\n'),
        ("p.csv", "id,prompt\n1,a red circle\n2,a blue square\n"),
        ("p.tsv", "caption\ta\na red circle\t1\na blue square\t2\n"),
    ],
)
def test_the_texts_of_a_builder_are_the_prompts_of_the_data(name, words, tmp_path):
    (tmp_path / name).write_text(words)
    read = captions(tmp_path / name)
    assert read == [prompt.text for prompt in prompts(path=str(tmp_path / name))]
    assert read == ["a red circle", "a blue square"]


@pytest.fixture(scope="module")
def flow_model(captioned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    texts = str(captioned[0] / "prompts.jsonl")
    options = {"texts": texts, "side": 16, "patch": 4, "width": 32, "layers": 1, "heads": 2, "text_width": 16}
    return folder, options, TinyFlowModel(stream=Stream(0), **options).build(folder)


def test_tiny_flow_model_is_a_pipeline_that_the_policy_takes_in_pixel_space(flow_model):
    from mmrl.core.types import Outcome
    from mmrl.diffusion.likelihoods.matching import Matching
    from mmrl.diffusion.policies.flow import Flow

    folder, _, counts = flow_model
    likelihood = Matching(stream=Stream(0), time_type="uniform", draws=1)
    policy = Flow(model=str(folder), likelihood=likelihood, dtype="float32", max_sequence_length=1)
    assert sum(p.numel() for p in policy.module.parameters()) == counts["parameters"]
    assert policy.family.latent_shape(policy.pipe, 16, 16, 1) == (3, 16, 16)
    image = torch.arange(256).view(1, 16, 16).expand(3, -1, -1).to(torch.uint8)
    (asked,) = prompts_of("a red circle")
    row = policy.encode(asked, Outcome(image=image))
    assert torch.equal(policy.decode(row.steps.path)[0], image)
    policy(policy.collate((row,))).logp.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in policy.module.parameters())


def prompts_of(*texts):
    from mmrl.core.types import Message, Part, Prompt

    return [Prompt(text, (Message("user", (Part(text),)),)) for text in texts]


def test_tiny_flow_model_tells_captions_apart(flow_model):
    from mmrl.diffusion.loading import load_pipeline

    pipe = load_pipeline(str(flow_model[0]), dtype="float32")
    texts = ["a red circle", "a blue circle", "circle a red"]
    states, _, pooled, _ = pipe.encode_prompt(
        prompt=texts,
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        max_sequence_length=1,
    )
    for one, other in ((0, 1), (0, 2)):
        assert (states[one] - states[other]).norm() > 0.1 * states[one].norm()
        assert (pooled[one] - pooled[other]).norm() > 0.1 * pooled[one].norm()


def test_tiny_flow_model_follows_its_seed_and_leaves_the_global_one_alone(flow_model, tmp_path):
    from safetensors.torch import load_file

    folder, options, _ = flow_model
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    for name, seed in (("same", 0), ("other", 1)):
        TinyFlowModel(stream=Stream(seed), **options).build(tmp_path / name)
    assert torch.equal(torch.rand(1), expected)
    first, same, other = (
        load_file(place / "transformer" / "diffusion_pytorch_model.safetensors")
        for place in (folder, tmp_path / "same", tmp_path / "other")
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="patches of 5 pixels must divide the side 16"):
        TinyFlowModel(stream=Stream(0), texts="", side=16, patch=5)


# ---- tiny_clip


class Towers:
    """A model whose features are given."""

    logit_scale = torch.zeros(())

    def __init__(self, texts):
        self.texts = texts

    def encode_image(self, images):
        return images

    def encode_text(self, tokens):
        return self.texts[tokens]


def test_contrast_counts_all_images_of_a_caption_as_right():
    # Two images of caption 0 on its axis, one of caption 1 on the other; caption 2 is not asked. The logit
    # of a image and its caption is 1, any other 0. Captions given images: ln(1 + 1/e). The other way,
    # caption 0 has e, e and 1 to share, each right by half: ln(2e + 1) - 1; caption 1: ln(e + 2) - 1.
    towers = Towers(torch.eye(3))
    loss = contrastive_loss(towers, torch.eye(3)[[0, 0, 1]], torch.arange(3), torch.tensor([0, 0, 1]))
    e = torch.e
    expected = 0.5 * (
        torch.tensor(1 + 1 / e).log()
        + 0.5 * (torch.tensor(2 * e + 1).log() - 1 + torch.tensor(e + 2).log() - 1)
    )
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)


def test_augmented_images_keep_their_form_and_follow_their_generator():
    shown = torch.rand(4, 3, 16, 16)
    before = shown.clone()
    one, same = (augmented(shown, torch.Generator().manual_seed(1)) for _ in range(2))
    assert one.shape == shown.shape and torch.equal(one, same) and torch.equal(shown, before)
    assert not torch.equal(one, augmented(shown, torch.Generator().manual_seed(2)))


@pytest.fixture(scope="module")
def judge(captioned, tmp_path_factory):
    pytest.importorskip("open_clip")
    folder, root = tmp_path_factory.mktemp("judge"), captioned[0]
    paths = {"train": str(root / "train.jsonl"), "test": str(root / "test.jsonl"), "root": str(root)}
    builder = TinyClip(
        stream=Stream(0), **paths, width=4, embed_dim=8, text_width=16, steps=12, batch_size=12
    )
    return folder, root, builder.build(folder)


@pytest.mark.slow
def test_contrastive_model_is_a_folder_that_open_clip_reads(judge):
    import open_clip

    folder, root, told = judge
    model, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(["a red circle"])
    assert tokens.shape == (1, 16) and model.eval().encode_text(tokens).shape == (1, 8)
    assert prepare(Image.new("RGB", (16, 16))).shape == (3, 32, 32)
    assert told["captions"] == 3 and 0 <= told["test_accuracy"] <= 1


@pytest.mark.slow
def test_contrastive_model_learns_and_clip_score_reads_it(judge):
    from mmrl.rewards.clip_score import ClipScore

    folder, root, told = judge
    found = images(path=str(root / "test.jsonl"), root=str(root))
    score = ClipScore(model=str(folder))
    shown = [prompt.answers[0] for prompt in found]
    values = torch.tensor([score([prompt] * 3, shown) for prompt in found])
    right = float((values.argmax(0) == torch.arange(3)).double().mean())
    assert told["test_accuracy"] == pytest.approx(right, abs=1e-4)


def test_captions_that_were_not_trained_on_are_an_error(captioned):
    path = captioned[0] / "train.jsonl"
    with pytest.raises(ValueError, match="captions that were not trained on: .'a blue circle'"):
        CaptionedImages.read(path, captioned[0], 16, ("a red circle", "a black circle"))
