"""Rewards that load a model: the published file layouts with random weights of tiny sizes, against
computations with the libraries alone."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream, seeded
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.reward_base import LinearHead
from mmrl.diffusion.rewards.clip_models import Aesthetic, Hpsv2, PickScore
from mmrl.diffusion.rewards.image_reward import ImageReward, rename
from tests.diffusion.tiny import CLIP_TEXT, clip_tokenizer
from tests.rewards import tiny_clip


def asking(text: str, uid: str = "p") -> Prompt:
    return Prompt(uid=uid, messages=(Message("user", (Part(text),)),))


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


SIZES = ((20, 24), (20, 24), (24, 20), (12, 40), (64, 33))


@pytest.fixture(scope="module")
def pictures() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8) for size in SIZES]


def prepared(picture: torch.Tensor, side: int, *, bars: bool = False) -> torch.Tensor:
    """Prepare a picture as CLIP's authors do, or HPSv2's with black bars: (3, side, side)."""
    image = to_pil(picture)
    scale = side / (max if bars else min)(image.size)
    fit = round if bars else int  # HPSv2's code rounds the shorter side, transformers cuts the longer one
    image = image.resize([fit(length * scale) for length in image.size], Image.Resampling.BICUBIC)
    whole = Image.new("RGB", (side, side))
    whole.paste(image, tuple((side - n) // 2 if n < side else -((n - side) // 2) for n in image.size))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = (np.asarray(whole) / 255 - np.array(mean)) / np.array(std)
    return torch.from_numpy(pixels).permute(2, 0, 1).float()


TEXTS = ["a red ball", "two dogs", "a red ball", "a cat", "one"]
PROMPTS = [asking(text, f"p{i}") for i, text in enumerate(TEXTS)]


def built(make):
    with seeded(0):
        return make()


# ---- PickScore


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A folder in the layout of PickScore_v1 and of CLIP, with its processor."""
    folder = tmp_path_factory.mktemp("transformers-clip")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 32,
    }
    text = {**CLIP_TEXT, "max_position_embeddings": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    built(lambda: transformers.CLIPModel(config)).save_pretrained(folder)
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    processor = transformers.CLIPImageProcessor(**size)
    transformers.CLIPProcessor(processor, clip_tokenizer(16)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pick_score(clip_folder):
    return lambda **options: PickScore(model=str(clip_folder), processor=str(clip_folder), **options)


SHORT = [asking(text, f"p{i}") for i, text in enumerate(["a red", "two", "a red", "a cat", "one"])]


def test_pick_score_is_the_logit_of_its_clip(pick_score, clip_folder, pictures):
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    processor = transformers.CLIPProcessor.from_pretrained(clip_folder)
    given = processor(text=[p.text for p in SHORT], padding=True, return_tensors="pt")
    pixels = torch.stack([prepared(picture, 16) for picture in pictures])
    with torch.no_grad():
        wanted = model(pixel_values=pixels, **given).logits_per_image.diagonal()
    outcomes = [Outcome(image=picture) for picture in pictures]
    logits = pick_score()(SHORT, outcomes)
    torch.testing.assert_close(torch.tensor(logits), wanted, rtol=1e-5, atol=1e-5)
    assert pick_score(divide_by=26.0)(SHORT, outcomes) == pytest.approx([value / 26 for value in logits])
    factor = float(model.logit_scale.detach().exp())
    assert pick_score(scale="cosine")(SHORT, outcomes) == pytest.approx([value / factor for value in logits])
    assert max(map(abs, logits)) > 0.1


def test_pick_score_says_what_it_cuts(pick_score, pictures):
    reward = pick_score()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward(SHORT[:1], [Outcome(image=pictures[0])])
    with pytest.warns(
        UserWarning, match="pick_score reads 16 tokens of a prompt.* 1 prompts of this round are longer"
    ):
        reward([asking("a very long prompt that goes on")], [Outcome(image=pictures[0])])


def test_missing_checkpoints_of_transformers_are_errors_before_training(tmp_path, clip_folder):
    with pytest.raises(ValueError, match="pick_score: cannot load '.*gone'"):
        PickScore(model=str(tmp_path / "gone"), processor=str(clip_folder))
    with pytest.raises(ValueError, match="pick_score: cannot load the processor '.*gone'"):
        PickScore(model=str(clip_folder), processor=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="aesthetic: cannot load '.*gone'"):
        Aesthetic(model=str(tmp_path / "gone"), weights="x")


def test_a_checkpoint_that_leaves_weights_open_is_refused(tmp_path, clip_folder):
    model = transformers.CLIPModel.from_pretrained(clip_folder)
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "visual_projection.weight"}
    model.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lack 1 of .* the first is 'visual_projection.weight'"):
        PickScore(model=str(tmp_path), processor=str(clip_folder))


# ---- HPSv2


@pytest.fixture(scope="module")
def hpsv2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hps")
    state = tiny_clip.weights(folder, "tiny-hps")
    torch.save({"epoch": 3, "name": "hps", "state_dict": state}, folder / "HPS_v2.1_compressed.pt")
    return lambda **options: Hpsv2(
        weights=str(folder / "HPS_v2.1_compressed.pt"), model="tiny-hps", **options
    )


def test_hpsv2_is_the_cosine_of_its_clip(hpsv2, pictures):
    import open_clip

    reward = hpsv2()
    model = open_clip.create_model("tiny-hps").eval()
    model.load_state_dict(reward.model.state_dict())
    side = model.visual.image_size[0]
    pixels = torch.stack([prepared(picture, side, bars=True) for picture in pictures])
    with torch.no_grad():
        look, read, _ = model(pixels, open_clip.get_tokenizer("tiny-hps")(TEXTS))
    wanted = (look @ read.T).diagonal()
    given = reward(PROMPTS, [Outcome(image=picture) for picture in pictures])
    torch.testing.assert_close(torch.tensor(given), wanted, rtol=0, atol=2e-6)
    assert len({round(value, 4) for value in given}) == 5


def test_hpsv2_refuses_other_weights(tmp_path, hpsv2):
    with pytest.raises(
        ValueError, match="hpsv2: there is no file 'gone.pt'; name a file, or owner/name:file"
    ):
        Hpsv2(weights="gone.pt")
    with pytest.raises(ValueError, match="hpsv2: cannot fetch 'hps.pt' of 'nobody/nothing'"):
        Hpsv2(weights="nobody/nothing:hps.pt")
    torch.save({"state_dict": {"logit_scale": torch.zeros(())}}, tmp_path / "other.pt")
    hpsv2()
    with pytest.raises(ValueError, match="does not hold the weights of 'tiny-hps'.*Missing key"):
        Hpsv2(weights=str(tmp_path / "other.pt"), model="tiny-hps")


def test_hpsv2_without_open_clip_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "open_clip", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'mmrl[clip]'")):
        Hpsv2(weights="x")


# ---- aesthetic


@pytest.fixture(scope="module")
def head_file(tmp_path_factory):
    """The published head: five linear layers under the names layers.0, 2, 4, 6 and 7."""
    path = tmp_path_factory.mktemp("head") / "sac+logos+ava1-l14-linearMSE.pth"
    sizes = (32, 1024, 128, 64, 16, 1)
    state = {}
    generator = torch.Generator().manual_seed(1)
    for place, (a, b) in zip((0, 2, 4, 6, 7), zip(sizes, sizes[1:], strict=False), strict=True):
        state[f"layers.{place}.weight"] = torch.randn(b, a, generator=generator) / a**0.5
        state[f"layers.{place}.bias"] = torch.randn(b, generator=generator)
    torch.save(state, path)
    return path


def linear(state: dict[str, torch.Tensor], features: torch.Tensor, prefix: str = "") -> torch.Tensor:
    for place in (0, 2, 4, 6, 7):
        features = (
            features @ state[f"{prefix}layers.{place}.weight"].T + state[f"{prefix}layers.{place}.bias"]
        )
    return features[:, 0]


def test_aesthetic_is_linear_layers_on_the_embedding(clip_folder, head_file, pictures):
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    pixels = torch.stack([prepared(picture, 16) for picture in pictures])
    with torch.no_grad():
        seen = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
    wanted = linear(torch.load(head_file), seen / seen.norm(dim=-1, keepdim=True))
    reward = Aesthetic(model=str(clip_folder), weights=str(head_file))
    rated = reward(PROMPTS, [Outcome(image=picture) for picture in pictures])
    torch.testing.assert_close(torch.tensor(rated), wanted, rtol=1e-5, atol=1e-5)
    assert len({round(value, 4) for value in rated}) == 5
    other = [asking("something else")] * 5
    assert reward(other, [Outcome(image=picture) for picture in pictures]) == rated, (
        "the prompt does not matter"
    )


def test_aesthetic_refuses_a_head_of_another_form(clip_folder, head_file, tmp_path):
    state = torch.load(head_file)
    for change, told in (
        ({"layers.7.bias": None}, r'Missing key.*"layers.7.bias"'),
        ({"layers.9.bias": torch.zeros(1)}, r'Unexpected key.*"layers.9.bias"'),
        ({"layers.7.bias": torch.zeros(2)}, r"size mismatch for layers.7.bias: .*\[2\].*\[1\]"),
    ):
        changed = {k: v for k, v in {**state, **change}.items() if v is not None}
        save_file(changed, tmp_path / "head.safetensors")
        with pytest.raises(ValueError, match=told):
            Aesthetic(model=str(clip_folder), weights=str(tmp_path / "head.safetensors"))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, not named tensors"):
        Aesthetic(model=str(clip_folder), weights=str(tmp_path / "list.pt"))


def test_code_in_a_checkpoint_is_not_run(clip_folder, tmp_path):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"x": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="Files that hold code are refused"):
        Aesthetic(model=str(clip_folder), weights=str(tmp_path / "bad.pt"))
    assert not (tmp_path / "ran").exists()


def test_the_head_is_of_the_published_sizes():
    shapes = [tuple(layer.weight.shape) for layer in LinearHead(768).layers if type(layer) is nn.Linear]
    assert shapes == [(1024, 768), (128, 1024), (64, 128), (16, 64), (1, 16)]


# ---- ImageReward


def blip():
    """A tiny pair of encoders, of one head of 64 numbers each, as transformers makes them."""
    from transformers.models.blip.configuration_blip import BlipTextConfig, BlipVisionConfig
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    vision = BlipVisionConfig(
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
        layer_norm_eps=1e-6,
        initializer_range=0.02,
    )
    text = BlipTextConfig(
        vocab_size=40,
        hidden_size=64,
        encoder_hidden_size=128,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=48,
        initializer_range=0.2,
    )
    return BlipVisionModel(vision).eval(), BlipTextModel(text, add_pooling_layer=False).eval()


def published(vision, text, head: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Write weights under the names of the published checkpoint, those of BLIP's authors."""
    names = {
        "embeddings.class_embedding": "cls_token",
        "embeddings.position_embedding": "pos_embed",
        "embeddings.patch_embedding.": "patch_embed.proj.",
        "post_layernorm.": "norm.",
        "encoder.layers.": "blocks.",
        "self_attn.projection.": "attn.proj.",
        "self_attn.qkv.": "attn.qkv.",
        "layer_norm1.": "norm1.",
        "layer_norm2.": "norm2.",
    }
    state = {}
    for name, tensor in vision.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[f"blip.visual_encoder.{name}"] = tensor
    state |= {f"blip.text_encoder.{name}": tensor for name, tensor in text.state_dict().items()}
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(48)[None]
    state |= {"blip.vision_proj.weight": torch.zeros(8, 128), "blip.text_proj.bias": torch.zeros(8)}
    return state | {f"mlp.{name}": tensor for name, tensor in head.items()}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Weights in the published layout, with a tokenizer, and the encoders they were taken from."""
    folder = tmp_path_factory.mktemp("image-reward")
    vision, text = built(blip)
    head = built(lambda: LinearHead(64)).state_dict()
    torch.save(published(vision, text, head), folder / "ImageReward.pt")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "ball", "two", "dogs", "cat", "one"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "words")
    options = {"weights": str(folder / "ImageReward.pt"), "tokenizer": str(folder / "words")}
    return options, vision, text, head


def test_image_reward_reads_the_prompt_while_looking(judged, pictures):
    options, vision, text, head = judged
    from torchvision.transforms import functional

    tokens = transformers.BertTokenizer.from_pretrained(options["tokenizer"])
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    wanted = []
    with torch.no_grad():
        for prompt, picture in zip(PROMPTS, pictures, strict=True):
            small = functional.resize(to_pil(picture), 32, functional.InterpolationMode.BICUBIC)
            pixels = functional.normalize(functional.to_tensor(functional.center_crop(small, 32)), mean, std)
            looks = vision(pixel_values=pixels[None]).last_hidden_state
            given = tokens(prompt.text, return_tensors="pt")
            read = text(
                given.input_ids,
                attention_mask=given.attention_mask,
                encoder_hidden_states=looks,
                encoder_attention_mask=torch.ones(looks.shape[:2], dtype=torch.long),
            )
            score = linear(head, read.last_hidden_state[:, 0])
            wanted.append(float((score - 0.16717362830052426) / 1.0333394966054072))
    reward = ImageReward(**options, batch_size=2)
    outcomes = [Outcome(image=picture) for picture in pictures]
    values = reward(PROMPTS, outcomes)
    assert values == pytest.approx(wanted, abs=1e-5)
    # Both the image and the prompt matter: the encoders are joined.
    swapped = reward(PROMPTS, outcomes[1:] + outcomes[:1])
    assert all(abs(a - b) > 1e-4 for a, b in zip(values, swapped, strict=True))
    assert abs(values[0] - reward([asking("two dogs")], outcomes[:1])[0]) > 1e-4
    assert reward(PROMPTS[::-1], outcomes[::-1]) == pytest.approx(values[::-1], abs=1e-6)


def test_image_reward_refuses_names_it_does_not_know(judged, tmp_path):
    options, vision, text, head = judged
    state = published(vision, text, head)
    assert not any(
        "proj." in name and name.startswith("blip") for name in rename({**state, **state}) if "text" in name
    )
    torch.save({**state, "blip.text_decoder.bias": torch.zeros(1)}, tmp_path / "more.pt")
    with pytest.raises(ValueError, match="the weights hold 'blip.text_decoder.bias', which ImageReward"):
        ImageReward(**{**options, "weights": str(tmp_path / "more.pt")})
    name = "blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"
    torch.save({k: v for k, v in state.items() if k != name}, tmp_path / "less.pt")
    with pytest.raises(
        ValueError, match='Missing key.*"text.encoder.layer.1.crossattention.self.key.weight"'
    ):
        ImageReward(**{**options, "weights": str(tmp_path / "less.pt")})
    torch.save({"mlp.layers.0.bias": torch.zeros(1)}, tmp_path / "head.pt")
    with pytest.raises(
        ValueError, match="not the weights of ImageReward.pt: 'vision.embeddings.patch_embedding.weight'"
    ):
        ImageReward(**{**options, "weights": str(tmp_path / "head.pt")})


def test_image_reward_wants_the_tokenizer_of_its_weights(judged, tmp_path):
    options, *_ = judged
    with pytest.raises(ValueError, match="cannot load the tokenizer '.*gone'"):
        ImageReward(**{**options, "tokenizer": str(tmp_path / "gone")})
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(50))])
    )
    transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match="has 55 tokens, the weights are for 40"):
        ImageReward(**{**options, "tokenizer": str(tmp_path / "words")})


# ---- all of them


@pytest.fixture(scope="module")
def every(pick_score, hpsv2, clip_folder, head_file, judged):
    return {
        "pick_score": pick_score(batch_size=2),
        "hpsv2": hpsv2(batch_size=2),
        "aesthetic": Aesthetic(model=str(clip_folder), weights=str(head_file), batch_size=2),
        "image_reward": ImageReward(**judged[0], batch_size=2),
    }


EACH = pytest.mark.parametrize("name", ["pick_score", "hpsv2", "aesthetic", "image_reward"])


@EACH
def test_a_reward_does_not_depend_on_its_batch(name, every, pictures):
    reward, outcomes = every[name], [Outcome(image=picture) for picture in pictures]
    together = reward(SHORT, outcomes)
    alone = [reward([p], [o])[0] for p, o in zip(SHORT, outcomes, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5)
    assert reward([], []) == []


@EACH
def test_a_video_gets_the_mean_of_its_frames_and_a_text_is_nothing_to_look_at(name, every, pictures):
    reward = every[name]
    clip = Outcome(video=torch.stack(pictures[:2]))
    images = [reward(SHORT[:1], [Outcome(image=picture)])[0] for picture in pictures[:2]]
    assert reward(SHORT[:1], [clip]) == pytest.approx([sum(images) / 2], abs=1e-6)
    with pytest.raises(ValueError, match="an outcome of prompt 'p0' has neither an image nor a video"):
        reward(SHORT[:1], [Outcome(text="a red ball")])
    with pytest.raises(ValueError, match="images are .3, height, width. uint8, not .3, 8, 8. torch.float32"):
        reward(SHORT[:1], [Outcome(image=torch.zeros(3, 8, 8))])


def test_checking_loads_nothing(tmp_path):
    pieces = Pieces(Stream())
    for name in ("pick_score", "hpsv2", "aesthetic", "image_reward"):
        option = "model" if name == "pick_score" else "weights"
        piece = Piece(f"diffusion.{name}", {option: str(tmp_path / "gone")})
        assert pieces.name("reward", piece).name == name
        with pytest.raises(ValueError, match=name):
            pieces.make("reward", piece)


def test_two_rewards_of_one_checkpoint_share_it(every, pick_score, hpsv2, clip_folder, head_file, judged):
    assert pick_score(scale="cosine").model is every["pick_score"].model
    assert hpsv2().model is every["hpsv2"].model
    assert Aesthetic(model=str(clip_folder), weights=str(head_file)).model is every["aesthetic"].model
    assert ImageReward(**judged[0]).model is every["image_reward"].model
    for reward in every.values():
        assert not reward.model.training
        assert {(p.dtype, p.requires_grad) for p in reward.model.parameters()} == {(torch.float32, False)}
