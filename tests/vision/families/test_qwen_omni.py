"""Qwen2.5-Omni and Qwen3-Omni: images, videos, sounds and videos with sound, against plain transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers as t

from mmrl.config.loading import ConfigError
from mmrl.core.types import Outcome, PromptError
from mmrl.data.media_reader import MediaReader
from mmrl.data.sound import as_wav
from mmrl.vision.models.loading import check_folders, load_encoder, load_model, load_processor
from mmrl.vision.models.model_families import family_of
from mmrl.vision.models.prompt_check import PromptCheck
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.wire import check_media
from tests.vision import mixed, tiny, tiny_omni
from tests.vision.families import common
from tests.vision.families.common import (  # noqa: F401
    loader,
    test_a_prompt_with_fewer_placeholders_than_features_is_refused,
    test_a_question_in_words_leaves_no_parameter_of_the_tower_without_a_gradient,
    test_greedy_answers_are_those_of_transformers,
    test_images_in_replies_are_read_as_transformers_read_them,
    test_the_doctor_finds_no_difference_from_transformers,
    test_the_number_of_features_is_that_of_the_model_for_every_size,
    test_tokens_and_pixels_are_those_of_the_processor,
)

OLD, NEW = tiny_omni.MAKERS


def prepare(policy):
    if policy.model.config.model_type == NEW:
        policy.model.set_experts_implementation("eager")  # the usual one takes no float64


exact = loader(tiny_omni.make, prepare)


@pytest.fixture(params=tiny_omni.MAKERS)
def family(request, monkeypatch):
    monkeypatch.setattr(mixed, "prompts", tiny_omni.prompts)
    monkeypatch.setattr(mixed, "placed", tiny_omni.placed)
    return request.param


LONG = [
    pytest.param(options, marks=pytest.mark.slow)
    for options in ({"gradient_checkpointing": True}, {"lora_rank": 2})
]


@pytest.mark.parametrize("options", [{}, *LONG], ids=str)
def test_values_and_gradients(exact, family, options):
    common.test_values_and_gradients_are_those_of_transformers(exact, family, options)


@pytest.mark.slow
def test_conversations(exact, family):
    common.test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family)


# ---- features


def test_the_number_of_features_of_a_sound_is_that_of_the_model(exact, family):
    policy = exact(family)
    for seconds in (0.03, 0.1, 0.333, 0.99, 1.0, 1.01, 2.0, 3.777):
        asked = tiny.ask(f"{seconds}", tiny_omni.sound(seconds), tiny_omni.sound(1.1, seed=1), "what")
        encoded = policy.prompt_encoder.encode(asked)
        features = policy.core.get_audio_features(**encoded.media, return_dict=True).last_hidden_state
        token = policy.model.config.audio_token_id
        count = len(features.reshape(-1, features.shape[-1]))
        assert int((encoded.ids == token).sum()) == count > 0
        assert family_of(policy.model.config).features(policy.core, encoded.media) == {token: count}


@pytest.mark.parametrize(
    ("family", "frames", "features"),
    # A convolution halves frames of 10 ms, rounded up, and pairs of the rest are averaged: 100 -> 50 -> 25.
    # Qwen3-Omni halves three times (100 -> 50 -> 25 -> 13), in windows of 100: 130 -> 13 + 4.
    [(OLD, (100, 101, 3, 1000), (25, 25, 1, 250)), (NEW, (100, 130, 3, 1000), (13, 17, 1, 130))],
)
def test_the_counts_by_hand(family, frames, features):
    config = SimpleNamespace(
        model_type=family, image_token_id=1, video_token_id=2, audio_token_id=3,
        vision_config=SimpleNamespace(spatial_merge_size=2), audio_config=SimpleNamespace(n_window=50),
    )  # fmt: skip
    for number, count in zip(frames, features, strict=True):
        found = family_of(config).features(
            SimpleNamespace(config=config),
            {"feature_attention_mask": torch.ones(1, number, dtype=torch.int64)},
        )
        assert found == {3: count}


def test_answers_depend_on_what_is_heard(exact, family):
    policy = exact(family)
    for one, other in (
        (tiny_omni.sound(1.0), tiny_omni.sound(1.0, pitch=1000.0)),
        (tiny_omni.film(4, heard=2.0), tiny_omni.film(4, heard=2.1)),
    ):
        asked = [tiny.ask("a", one, "what"), tiny.ask("b", other, "what")]
        with torch.no_grad():
            logp = policy(policy.collate(tuple(policy.encode(a, Outcome(text="fox")) for a in asked))).logp
        assert (logp[0] - logp[1]).abs().max() > 1e-4


def test_the_towers_learn_only_if_they_should_and_silence_reaches_every_weight(exact, family):
    policy = exact(family)
    used = []
    for asked in (
        tiny_omni.prompts(family)[1],
        tiny_omni.prompts(family)[0],
        tiny.ask("c", tiny.picture(), "x"),
    ):
        (row,) = mixed.generate(policy, [asked])
        policy(policy.collate((row,))).logp.sum().backward()
        used.append(mixed.gradients(policy))
    assert used[0].keys() <= used[1].keys() and used[0].keys() <= used[2].keys()
    heard = [name for name in used[0] if "audio_tower" in name]
    assert len(heard) > 10 and any(used[0][name].any() for name in heard)
    assert not any(used[1][name].any() or used[2][name].any() for name in heard)


# ---- positions


def core_of(family):
    """A stand-in for a model: token 1 is an image, 2 a video, 3 a sound, 4 to 7 start or end them."""
    config = SimpleNamespace(
        model_type=family, image_token_id=1, video_token_id=2, audio_token_id=3,
        audio_start_token_id=4, audio_end_token_id=5, vision_start_token_id=6, vision_end_token_id=7,
        position_id_per_seconds=25 if family == OLD else 13, seconds_per_chunk=2,
        vision_config=SimpleNamespace(spatial_merge_size=2), audio_config=SimpleNamespace(n_window=50),
    )  # fmt: skip
    return SimpleNamespace(config=config, spatial_merge_size=2)


def positions(family, ids, *, images=(), videos=(), seconds=()):
    """Place tokens; grids are (frames, rows, columns) of features."""
    inputs = {"input_ids": torch.tensor([ids])}
    for name, grids in (("image_grid_thw", images), ("video_grid_thw", videos)):
        if grids:
            inputs[name] = torch.tensor(grids) * torch.tensor([1, 2, 2])
    if videos:
        inputs["video_second_per_grid"] = torch.tensor(seconds)
    return family_of(core_of(family).config).positions(core_of(family), inputs)


def same(*numbers):
    return [[number] * 3 for number in numbers]


def test_positions_of_a_sound_an_image_and_a_video_by_hand():
    ids = [9, 4, 3, 3, 5, 6, 1, 1, 1, 1, 1, 1, 7, 6, 2, 2, 2, 2, 7, 9]
    shown = {"images": [(1, 2, 3)], "videos": [(2, 1, 2)], "seconds": [0.5]}
    begin = [
        *same(0, 1, 2, 3, 4, 5),  # a text, and a sound with its start and end
        *([6, row, column] for row in (6, 7) for column in (6, 7, 8)),
        *same(9, 10),  # the largest number of the image is 8
    ]
    # Qwen2.5-Omni: 25 numbers a second, frames at 0 and 12.5, rounded down.
    old = positions(OLD, ids, **shown).T.tolist()
    video = [[11, 11, 11], [11, 11, 12], [23, 11, 11], [23, 11, 12]]
    assert old == [*begin, *video, *same(24, 25)]
    # Qwen3-Omni: 13 numbers a second, frames at 0 and 6.5.
    new = positions(NEW, ids, **shown)
    video = [[11, 11, 11], [11, 11, 12], [17.5, 11, 11], [17.5, 11, 12]]
    assert new.dtype == torch.float32 and new.T.tolist() == [*begin, *video, *same(18.5, 19.5)]


def test_positions_of_a_video_with_its_sound_by_hand():
    # Two frames of two features, a second apart: at 0 and 25, and three features of sound in these 2 seconds.
    old = positions(OLD, [9, 6, 4, 2, 2, 2, 2, 3, 3, 3, 5, 7, 9], videos=[(2, 1, 2)], seconds=[1.0])
    assert old.T.tolist() == [
        *same(0, 1, 1),  # the start tokens share a number
        [2, 2, 2], [2, 2, 3], [27, 2, 2], [27, 2, 3],
        *same(2, 3, 4),
        *same(5, 5),  # the end tokens follow the sound, which is last, and share a number
        *same(6),
    ]  # fmt: skip
    # Frames at 0 and 13; 14 features of sound, of which the first 13 come before the second frame.
    ids = [9, 6, 4, 2, 2, *[3] * 13, 2, 2, 3, 5, 7, 9]
    new = positions(NEW, ids, videos=[(2, 1, 2)], seconds=[1.0])
    assert new.T.tolist() == [
        *same(0, 1, 2),
        [3, 3, 3], [3, 3, 4], *same(*range(3, 16)), [16, 3, 3], [16, 3, 4], *same(16),
        *same(17, 18, 19),
    ]  # fmt: skip
    # A video without sound may stand beside one with it.
    both = positions(OLD, [6, 2, 7, 6, 4, 2, 3, 5, 7], videos=[(1, 1, 1)] * 2, seconds=[1.0, 1.0])
    assert both.T.tolist() == same(0, 1, 2, 3, 3, 4, 4, 5, 5)


def test_positions_are_those_of_the_model(exact, family):
    policy = exact(family)
    for prompt in (
        *tiny_omni.prompts(family),
        tiny.ask("x", tiny_omni.film(8, seconds=0.31, heard=1.0), "y"),
    ):
        encoded = policy.prompt_encoder.encode(prompt)
        wanted = tiny_omni.placed(policy, encoded, 3)["position_ids"][:, 0]
        if (
            prompt.uid == "x" and family == OLD
        ):  # frames end after the text, and `generate` goes on after them
            assert encoded.next_position > wanted[:, -1].max()
            wanted[:, -3:] = encoded.next_position + torch.arange(3)
        assert torch.equal(encoded.positions, wanted[:, :-3].to(encoded.positions.dtype))
        after = encoded.next_position + torch.arange(3)
        assert torch.equal(wanted[:, -3:], after.expand(3, -1).to(wanted.dtype))


# ---- checkpoints


@pytest.fixture
def whole(tmp_path, exact, family):
    """The folder of a whole Omni checkpoint: a thinker, and a talker that nobody reads."""
    from safetensors.torch import save_file

    config, processor = tiny_omni.parts(family)
    full = (t.Qwen2_5OmniConfig if family == OLD else t.Qwen3OmniMoeConfig)(thinker_config=config.to_dict())
    full.architectures = [
        "Qwen2_5OmniForConditionalGeneration" if family == OLD else "Qwen3OmniMoeForConditionalGeneration"
    ]
    full.save_pretrained(tmp_path / "whole")
    exact(family).model.save_pretrained(tmp_path / "thinker")
    from safetensors.torch import load_file

    weights = {
        f"thinker.{name}": value
        for name, value in load_file(tmp_path / "thinker" / "model.safetensors").items()
    }
    save_file(
        {**weights, "talker.codec_head.weight": torch.zeros(2, 2)},
        tmp_path / "whole" / "model.safetensors",
        {"format": "pt"},
    )
    processor.save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def test_of_a_whole_checkpoint_the_thinker_is_loaded_and_saved(whole, exact, family, tmp_path):
    wanted = exact(family).model.state_dict()
    assert check_folders(str(whole)) is not None
    policy = Tokens(model=str(whole), dtype="float64")
    assert policy.model.config.model_type == family
    assert not any(
        p.requires_grad for name, p in policy.model.named_parameters() if "visual" in name or "audio" in name
    )
    found = policy.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value.double(), wanted[name].double()) for name, value in found.items())
    adapted = Tokens(model=str(whole), lora_rank=2).model.named_parameters()
    learned = [name for name, value in adapted if value.requires_grad]
    assert learned and all("language_model" in name for name in learned)
    encoder = load_encoder(str(whole))  # without weights
    prompt = tiny_omni.prompts(family)[4]
    assert torch.equal(encoder.encode(prompt).positions, policy.prompt_encoder.encode(prompt).positions)
    policy.save(tmp_path / "saved")
    again = t.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert type(again) is type(policy.model)
    assert all(torch.equal(value, found[name].double()) for name, value in again.state_dict().items())
    assert type(load_processor(str(tmp_path / "saved"))) is type(policy.processor)


def test_the_released_configurations_have_the_names_that_are_read(family):
    config = {OLD: t.Qwen2_5OmniConfig, NEW: t.Qwen3OmniMoeConfig}[family]().thinker_config
    assert config.model_type == family
    assert (config.image_token_id, config.video_token_id, config.audio_token_id) == (151655, 151656, 151646)
    assert config.position_id_per_seconds == 25 and config.audio_start_token_id == 151647
    assert config.vision_config.spatial_merge_size == 2 and config.audio_config.n_window in (50, 100)


# ---- bad input


def test_sounds_that_the_model_cannot_read_are_one_line(exact, family, tmp_path):
    policy = exact(family)
    encoder, read = policy.prompt_encoder, MediaReader()
    check = PromptCheck(encoder)
    other = (9.0, "lasts 9.00 s, and this model reads sounds of 8 s; cut it")
    if family == NEW:
        other = (0.99, r"lasts 0.99 s, and the features .* below 1 s; append silence")
    for seconds, words in ((0.02, "lasts 0.0200 s, less than a window of the spectrum, 0.025 s"), other):
        path = tmp_path / f"{seconds}.wav"
        path.write_bytes(as_wav(tiny_omni.tone(seconds)))
        prompt = tiny.ask("long", read("audio", path, "it"), "what")
        with pytest.raises(PromptError, match=words):
            encoder.encode(prompt)
        if seconds != 0.99:
            with pytest.raises(PromptError, match=words):
                check(prompt)
    path = tmp_path / "a.wav"
    path.write_bytes(as_wav(tiny_omni.tone(1.0)))
    check(tiny.ask("right", read("audio", path, "it"), "what"))
    two = tiny.ask("two", tiny_omni.film(4, seconds=1.0), tiny_omni.film(4, seconds=0.5, seed=1), "x")
    with pytest.raises(
        PromptError, match="shows videos with sound, but at 1 and 2 frames per second; sample"
    ):
        encoder.encode(two)
    alike = tiny.ask(
        "alike", tiny_omni.film(4), tiny.clip(4), "x", tiny_omni.film(4, seed=1), tiny_omni.sound(1.0)
    )
    assert "input_features" in encoder.encode(alike).media
    with pytest.raises(ConfigError, match=f"cannot send audios to a model of type '{family}'"):
        check_media(policy.model.config, [prompt])


def test_other_models_read_no_sounds(checkpoint):
    encoder = load_encoder(str(checkpoint("qwen2_5_vl")))
    with pytest.raises(PromptError, match="shows an audio, but this model reads no sounds"):
        encoder.encode(tiny.ask("a", tiny_omni.sound(), "x"))
    with pytest.raises(PromptError, match="shows videos with sound, but this model reads videos without it"):
        encoder.encode(tiny.ask("a", tiny_omni.film(), "x"))


def test_a_whole_omni_model_in_memory_is_refused(family):
    from mmrl.config import objects

    config, _ = tiny_omni.parts(family)
    with torch.device("meta"):
        name = objects.put("thinker", t.AutoModelForImageTextToText.from_config(config))
    assert load_model(name, dtype="float32", attn_implementation="sdpa") is not None
