"""CLIPScore: real computations on tiny random models of open_clip, worked numbers on features that are set
by hand."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt
from mmrl.rewards import clip_score
from mmrl.rewards.clip_score import ClipScore, harmonic_mean, load_towers, split_sentences, split_text
from tests.rewards import tiny_clip


@pytest.fixture(autouse=True)
def quiet(caplog):
    """open_clip warns of random weights through the root logger."""
    caplog.set_level(logging.ERROR)


def asking(text: str = "", image: torch.Tensor | None = None, **columns) -> Prompt:
    frames = None if image is None else Frames(image[None], torch.zeros(1))
    parts = (
        (Part(text),) if image is None else (Part(text), Part(media=Media("image", "a.png", lambda: frames)))
    )
    return Prompt(uid="p", messages=(Message("user", parts),), columns=columns)


def random_images(
    num: int, generator: torch.Generator, size: tuple[int, int] = (20, 24)
) -> list[torch.Tensor]:
    return [torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8) for _ in range(num)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_clip.write_folder(tmp_path_factory.mktemp("clip") / "plain")


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    return tiny_clip.write_folder(tmp_path_factory.mktemp("clip") / "sigmoid", tiny_clip.SIGLIP)


def plainly(folder, images, texts):
    """What open_clip says of pairs: cosines, and the logits of its own forward call."""
    import open_clip
    from PIL import Image

    name = f"local-dir:{folder}"
    model, _, prepare = open_clip.create_model_and_transforms(name)
    model.eval()
    pixels = torch.stack([prepare(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images])
    ids = open_clip.get_tokenizer(name)(texts)
    with torch.no_grad():
        look, read, factor, *bias = model(pixels, ids)
    cosines = (look * read).sum(-1)
    return cosines, cosines * factor + (bias[0] if bias else 0.0)


# ---- against open_clip


@pytest.mark.parametrize("kind", ["folder", "siglip"])
def test_cosines_and_logits_are_those_of_open_clip(kind, request, generator):
    where = request.getfixturevalue(kind)
    images, texts = random_images(3, generator), ["a red ball", "two dogs", "a red ball"]
    cosines, logits = plainly(where, images, texts)
    prompts = [asking(text) for text in texts]
    outcomes = [Outcome(image=image) for image in images]
    assert cosines.abs().max() > 0.01
    for scale, wanted in (("cosine", cosines), ("logit", logits)):
        given = ClipScore(model=str(where), scale=scale)(prompts, outcomes)
        torch.testing.assert_close(torch.tensor(given), wanted, rtol=1e-6, atol=2e-6)
    if kind == "siglip":
        assert logits.max() < 0, "the bias of -10 counts"


def test_the_scale_of_a_training_divides(folder, generator):
    pair = [asking("a red ball")], [Outcome(image=random_images(1, generator)[0])]
    logit = ClipScore(model=str(folder), scale="logit")(*pair)[0]
    assert ClipScore(model=str(folder), scale="logit", divide_by=30.0)(*pair)[0] == pytest.approx(logit / 30)


def test_a_reward_does_not_depend_on_its_batch(folder, generator):
    images = random_images(7, generator)
    prompts = [asking(f"image number {i}") for i in range(7)]
    outcomes = [Outcome(image=image) for image in images]
    reward = ClipScore(model=str(folder), batch_size=3)
    together = reward(prompts, outcomes)
    alone = [reward([p], [o])[0] for p, o in zip(prompts, outcomes, strict=True)]
    assert together == pytest.approx(alone, abs=1e-6)
    assert reward(prompts[::-1], outcomes[::-1]) == pytest.approx(together[::-1], abs=1e-6)
    assert len({round(value, 6) for value in together}) == 7
    assert reward([], []) == []


def test_equal_images_and_texts_are_encoded_once(folder, generator, monkeypatch):
    first, second = random_images(2, generator)
    reward = ClipScore(model=str(folder))
    seen = {"look": [], "read": []}
    for name, counted in seen.items():
        encode = getattr(reward.towers, name)
        monkeypatch.setattr(
            reward.towers, name, lambda things, c=counted, e=encode: (c.append(len(things)), e(things))[1]
        )
    values = reward([asking("a ball")] * 4, [Outcome(image=i) for i in (first, second, first.clone(), first)])
    assert seen == {"look": [2], "read": [1]}
    assert values[0] == values[2] == values[3] != values[1]


def test_a_video_gets_the_mean_of_its_frames(folder, generator):
    images = random_images(2, generator)
    reward = ClipScore(model=str(folder))
    outcomes = [Outcome(video=torch.stack(images)), *(Outcome(image=image) for image in images)]
    video, first, second = reward([asking("a ball")] * 3, outcomes)
    assert video == pytest.approx((first + second) / 2, abs=1e-6)


def test_a_caption_is_compared_with_the_image_of_its_prompt(folder, generator):
    image = random_images(1, generator)[0]
    reward = ClipScore(model=str(folder))
    caption = reward([asking("what is this?", image)], [Outcome(text="a red ball")])
    assert caption == pytest.approx(reward([asking("a red ball")], [Outcome(image=image)]), abs=1e-6)
    with pytest.raises(ValueError, match="prompt 'p' has 0"):
        reward([asking("what is this?")], [Outcome(text="a red ball")])
    with pytest.raises(ValueError, match="neither an image nor a text"):
        reward([asking("what is this?", image)], [Outcome()])


def test_a_image_may_be_compared_with_a_column(folder, generator):
    image = random_images(1, generator)[0]
    plain = ClipScore(model=str(folder))([asking("a red ball")], [Outcome(image=image)])
    reward = ClipScore(model=str(folder), against="caption")
    assert reward([asking("draw it", caption="a red ball")], [Outcome(image=image)]) == plain
    with pytest.raises(
        ValueError, match="with 'caption', which prompt 'p' does not have; it has prompt, title"
    ):
        reward([asking("draw it", title="x")], [Outcome(image=image)])


def test_images_are_bytes_with_three_channels(folder):
    reward = ClipScore(model=str(folder))
    for image in (torch.zeros(3, 8, 8), torch.zeros(1, 8, 8, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=re.escape("(3, height, width) uint8, not at")):
            reward([asking("a ball")], [Outcome(image=image)])


# ---- worked numbers


class Told:
    """Towers whose images lie at (1, 0, ...) and whose texts lie where a table says: cosines are set by
    hand."""

    factor, bias, length = 100.0, None, 6

    def __init__(self, cosines: dict[str, float]) -> None:
        self.cosines = cosines

    def fits(self, text: str) -> bool:
        return len(text.split()) <= self.length

    def look(self, images):
        return torch.eye(2, dtype=torch.float64)[:1].expand(len(images), 2)

    def read(self, texts):
        rows = [[self.cosines[text], math.sqrt(1 - self.cosines[text] ** 2)] for text in texts]
        return torch.tensor(rows, dtype=torch.float64)


def test_an_empty_text_has_the_cosine_zero_on_every_scale(siglip, generator):
    image = random_images(1, generator)[0]
    pair = [asking("", image, known=["a dog"])], [Outcome(text=" ")]
    # On the scale of the logit of a SigLIP this is its bias; 0 would be more than any caption earns.
    for scale, wanted in (("cosine", 0.0), ("clipscore", 0.0), ("logit", -10.0)):
        assert ClipScore(model=str(siglip), scale=scale)(*pair) == [wanted]
    assert ClipScore(model=str(siglip), scale="clipscore", references="known")(*pair) == [0.0]


@pytest.fixture
def told(monkeypatch):
    """Give the reward of a text by the cosines of its parts."""

    def make(text, cosines, known=(), **options):
        monkeypatch.setattr(clip_score, "load_towers", lambda *named: Told(cosines))
        reward = ClipScore(**{"prefix": "", **options})
        image = torch.zeros(3, 4, 4, dtype=torch.uint8)
        prompt = asking(text, known=known)
        return reward([prompt], [Outcome(image=image)])[0]

    return make


def test_clipscore_is_the_cosine_above_zero_times_two_and_a_half(told):
    assert told("a dog", {"a dog": -0.1}, scale="clipscore") == 0.0
    assert told("a dog", {"a dog": 0.3}, scale="clipscore") == pytest.approx(0.75)
    assert told("a dog", {"a dog": 0.5}, scale="clipscore") == pytest.approx(1.25), "there is no bound above"
    assert told("a dog", {"a dog": -0.1}) == pytest.approx(-0.1)
    assert told("a dog", {"a dog": 0.3}, scale="logit") == pytest.approx(30)
    assert told("  ", {}, scale="logit") == 0.0


def test_the_prefix_of_clipscore_stands_before_caption_and_references(told):
    cosines = {"A photo depicts a dog": 0.3, "A photo depicts dogs": 0.1}
    assert told("a dog", cosines, scale="clipscore", prefix=None) == pytest.approx(0.75)
    assert told("a dog", cosines, ["dogs"], scale="clipscore", prefix=None, references="known") > 0
    assert told("a dog", {"a dog": 0.3}, scale="cosine", prefix=None) == pytest.approx(0.3)


def test_refclipscore_is_the_harmonic_mean_with_the_best_reference(told):
    # 2 * .75 * .6 / 1.35 = 2/3
    assert harmonic_mean(0.75, 0.6) == pytest.approx(2 / 3)
    assert harmonic_mean(0.0, 0.0) == 0.0
    # The same text has the cosine 1, so with a = 2.5 * .2 = .5: 2 * .5 * 1 / 1.5 = 2/3. The other reference,
    # at the cosine .2 * -.2 + sqrt(.96)^2 = .92 of the caption, is not the best.
    cosines = {"a dog": 0.2, "a cat": -0.2}
    refer = {"scale": "clipscore", "references": "known"}
    assert told("a dog", cosines, ["a cat", "a dog"], **refer) == pytest.approx(2 / 3)
    # 2 * .5 * .92 / 1.42
    assert told("a dog", cosines, "a cat", **refer) == pytest.approx(0.92 / 1.42)
    # A reference on the other side counts 0, and so does the whole: .6 * -.6 - .8 * ... is below 0.
    assert told("a dog", {"a dog": 1.0, "no": -1.0}, ["no"], **refer) == 0.0
    assert told("a dog", {"a dog": 0.2}, [], **refer) is None, "without references it does not apply"


LONG = "A dog is here. There it runs away. It is very blue."
PARTS = {"A dog is here.": 0.3, "There it runs away.": -0.2, "It is very blue.": 0.1}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, 0.4 / 3),  # (.3 + 0 + .1) / 3
        ({"scale": "clipscore"}, 1.0 / 3),
        ({"scale": "logit"}, 40 / 3),
        ({"pool": "min"}, 0.0),
        ({"pool": "length"}, 1.6 / 12),  # four words each, twelve in all
        # -tau log of the mean of exp(-3), 1 and exp(-1), with tau .1
        ({"pool": "soft_min", "tau": 0.1}, -0.1 * math.log((math.exp(-3) + 1 + math.exp(-1)) / 3)),
        ({"pool": "soft_min", "tau": 1e-4}, 1e-4 * math.log(3)),  # nearly the smallest, and finite
        ({"pool": "soft_min", "tau": 1e4}, 0.4 / 3),  # nearly the mean
    ],
)
def test_long_texts_are_pooled_over_their_sentences(told, options, wanted):
    assert told(LONG, PARTS, **options) == pytest.approx(wanted, abs=2e-6)


def test_words_weigh_where_sentences_are_weighed_by_length(told):
    parts = {"It is red.": 0.1, "There is one more thing here.": 0.4}
    # (3 * .1 + 6 * .4) / 9
    assert told("It is red. There is one more thing here.", parts, pool="length") == pytest.approx(0.3)


def test_short_texts_are_split_where_that_is_wanted(told):
    parts = {"It is red. Now go!": 0.7, "It is red.": 0.2, "Now go!": 0.9}
    assert told("It is red. Now go!", parts) == pytest.approx(0.7)
    assert told("It is red. Now go!", parts, split="always") == pytest.approx(0.2), "two words tell nothing"


# ---- texts that are too long


def test_nothing_after_the_context_is_cut_in_silence(folder, generator, monkeypatch):
    image = random_images(1, generator)[0]
    start = "a big dog sits by a red door and looks"  # 10 words fill the 12 places with their two ends
    late = [f"{start}. Behind it there is {what}." for what in ("a cat", "an elephant")]
    reward = ClipScore(model=str(folder))
    tower = reward.towers
    assert tower.fits(start) and not tower.fits(f"{start} up")
    cut = tower.read(late)
    assert torch.equal(cut[0], cut[1]), "one pass does not see the difference"
    # At 0 there is a floor, which a random model may stand below.
    monkeypatch.setattr(tower, "look", lambda images: tower.read(late)[:1].expand(len(images), -1))
    cat, elephant = reward([asking(text) for text in late], [Outcome(image=image)] * 2)
    assert cat != pytest.approx(elephant, abs=1e-4)


def test_sentences_say_where_a_caption_leaves_the_image(folder, generator, monkeypatch):
    reward, image = ClipScore(model=str(folder), split="always"), random_images(1, generator)[0]
    texts = ["A red ball lies there.", "Two dogs are near."]
    prompt, outcome = asking("", image), Outcome(text=" ".join(texts))
    cosines, _ = plainly(folder, [image] * 2, texts)
    assert cosines.max() < 0, "a random model sees nothing but its opposite"
    assert reward([prompt], [outcome]) == [0.0], "parts are at least 0"
    look = reward.towers.look
    monkeypatch.setattr(reward.towers, "look", lambda images: -look(images))
    assert split_sentences(outcome.text) == texts
    assert reward([prompt], [outcome]) == [pytest.approx(-cosines.mean().item(), abs=2e-6)]


def test_sentences_end_where_they_end():
    text = 'Dr. Smith paid 3.5 dollars. "Is it red?" He asks! J. R. runs, e.g. home.\n- a ball\n2) a cat'
    assert split_sentences(text) == [
        "Dr. Smith paid 3.5 dollars.",
        '"Is it red?"',
        "He asks!",
        "J. R. runs, e.g. home.",
        "a ball",
        "a cat",
    ]
    assert split_sentences("你好。再见。") == ["你好。", "再见。"]
    assert split_sentences("") == []


def test_what_does_not_fit_is_split_at_clauses_words_and_letters():
    fits = lambda text: len(text) <= 12
    assert split_text("one two; six, ten and four five", fits) == ["one two;", "six, ten", "and four", "five"]
    assert split_text("abcdefghijklmnopqrstuvwxyz", fits) == ["abcdefghijkl", "mnopqrstuvwx", "yz"]
    wide = lambda text: len(text) <= 30
    # Fragments of fewer than three words, or without a letter, are dropped where something else is left.
    assert split_text("A red ball is here. Yes. 1 2 3 4.", wide) == ["A red ball is here."]
    assert split_text("Yes. No.", wide) == ["Yes.", "No."]
    with pytest.raises(ValueError, match="single letter"):
        split_text("abc", lambda text: False)


# ---- loading


def test_a_file_of_weights_goes_with_an_architecture(tmp_path, folder, generator):
    state = tiny_clip.weights(tmp_path, "tiny-for-a-file")
    torch.save({"epoch": 1, "state_dict": state}, tmp_path / "w.pt")
    pair = [asking("a red ball")], [Outcome(image=random_images(1, generator)[0])]
    reward = ClipScore(model="tiny-for-a-file", pretrained=str(tmp_path / "w.pt"))
    assert reward(*pair) == pytest.approx(ClipScore(model=str(folder))(*pair), abs=1e-6)


def test_missing_weights_are_an_error_before_training(tmp_path, folder):
    tiny_clip.architecture("tiny-alone", tmp_path)
    with pytest.raises(ValueError, match=r"cannot load 'tiny-alone' with the weights 'openai'"):
        ClipScore(model="tiny-alone")
    with pytest.raises(ValueError, match=r"cannot load 'tiny-alone' with the weights '.*gone.pt'"):
        ClipScore(model="tiny-alone", pretrained=str(tmp_path / "gone.pt"))
    with pytest.raises(ValueError, match="neither a folder nor an architecture.*did you mean 'vit-b-32'"):
        ClipScore(model="ViT-B-33")
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(ValueError, match="config file missing"):
        ClipScore(model=str(bare))
    (bare / "open_clip_config.json").write_text((folder / "open_clip_config.json").read_text())
    with pytest.raises(ValueError, match="cannot load .*bare'.*Required pretrained weights"):
        ClipScore(model=str(bare))
    with pytest.raises(ValueError, match="brings its own weights; leave out `pretrained`, which is 'x.pt'"):
        ClipScore(model=str(folder), pretrained="x.pt")


def test_code_in_a_file_of_weights_is_not_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    tiny_clip.architecture("tiny-harmed", tmp_path)
    torch.save({"state_dict": {"x": Harmful()}}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="cannot load"):
        ClipScore(model="tiny-harmed", pretrained=str(tmp_path / "bad.pt"))
    assert not (tmp_path / "ran").exists()


def test_tags_that_were_trained_with_a_quick_gelu_get_one(monkeypatch):
    import open_clip

    asked = {}

    def record(name, **options):
        asked[name] = options["force_quick_gelu"]
        raise RuntimeError("no network")

    monkeypatch.setattr(open_clip, "create_model_and_transforms", record)
    for name, tag in (("ViT-L-14", None), ("ViT-B-32", "laion2b_s34b_b79k")):
        with pytest.raises(ValueError, match="no network"):
            ClipScore(model=name, pretrained=tag)
    assert asked == {"ViT-L-14": True, "ViT-B-32": False}


def test_two_rewards_of_one_model_share_it(folder):
    first, second = ClipScore(model=str(folder)), ClipScore(model=str(folder), scale="logit")
    assert first.towers is second.towers is load_towers(str(folder), None, "cpu")
    assert not first.towers.model.training
    assert not any(p.requires_grad for p in first.towers.model.parameters())
    assert {p.dtype for p in first.towers.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("options", [{"tau": 0.0}, {"batch_size": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=f"'reward.{next(iter(options))}' must be"):
        Pieces(Stream()).check("reward", Piece("clip_score", options), "reward")


@pytest.mark.parametrize("options", [{"divide_by": 0.0}, {"references": "known", "scale": "cosine"}])
def test_impossible_options_are_refused(options, monkeypatch):
    monkeypatch.setattr(
        clip_score, "load_towers", lambda *named: pytest.fail("loaded before the options were read")
    )
    with pytest.raises(ValueError, match="clip_score needs|RefCLIPScore takes"):
        ClipScore(**options)


def test_open_clip_that_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "open_clip", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'mmrl[clip]'")):
        ClipScore(model="ViT-B-32")


def test_naming_a_reward_loads_nothing(monkeypatch, folder):
    pieces = Pieces(Stream())
    piece = Piece("clip_score", {"model": str(folder), "weight": 0.5, "label": "clip"})
    monkeypatch.setattr(clip_score, "load_towers", lambda *named: pytest.fail("loaded"))
    named = pieces.name("reward", piece)
    assert (named.name, named.weight, pieces.made) == ("clip", 0.5, {})
    monkeypatch.undo()
    assert pieces.make("reward", piece).function.towers.length == 12


def test_what_is_read_at_once_is_told(folder):
    plain, split = ClipScore(model=str(folder)), ClipScore(model=str(folder), split="always")
    assert plain.reads_whole("a red ball") and not split.reads_whole("a red ball")
    assert not plain.reads_whole("a red ball and two dogs and a cat and one more very old grey mouse")


# ---- hardness
