"""Gemma 3n and Gemma 4 hear, against plain transformers."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.types import Outcome, PromptError
from mmrl.vision.models.model_families import family_of
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny, tiny_gemma, tiny_omni
from tests.vision.families import common
from tests.vision.families.common import loader


def prepare(policy):
    if policy.model.config.model_type == "gemma4":
        return tiny_gemma.hear_in_float32(policy)
    # As users of transformers do, who convert inputs to the dtype of the model.
    tower = policy.core.audio_tower
    tower.register_forward_pre_hook(lambda module, given: (given[0].to(module.dtype), *given[1:]))


exact = loader(tiny_gemma.make, prepare)


def prompts(family):
    return [
        tiny.ask("words", "the quick brown fox"),
        tiny.ask("sound", "what", tiny_omni.sound(0.7)),
        tiny.ask(
            "both",
            tiny_omni.sound(1.3, rate=22050, seed=1),
            "like",
            tiny.picture(),
            tiny_omni.sound(0.2, seed=2),
        ),
    ]


# Features of 0.7 seconds. Gemma 4: (11200 + 160 - 321) // 160 + 1 = 69 frames, and one feature for four.
FEATURES = {"gemma3n": 188, "gemma4": 18}


@pytest.fixture(params=sorted(FEATURES))
def family(request, monkeypatch):
    monkeypatch.setattr(mixed, "prompts", prompts)
    return request.param


def test_tokens_and_spectra_are_those_of_the_processor(exact, family):
    common.test_tokens_and_pixels_are_those_of_the_processor(exact, family)


def test_values_are_those_of_transformers_alone(exact, family):
    policy = exact(family)
    rows = mixed.answered(policy, family)
    with torch.no_grad():
        said = policy(policy.collate(rows)).logp
        for i, row in enumerate(rows):
            logp = common.log_probabilities(policy, row.steps.prompt, row.steps.ids)[-row.length :]
            mixed.assert_close(family, said[i, : row.length], logp, rtol=0, atol=1e-6)


def test_answers_depend_on_the_sound_and_its_features_are_counted(exact, family):
    policy = exact(family)
    (one,) = mixed.generate(policy, prompts(family)[1:2])
    encoded, token = one.steps.prompt, policy.model.config.audio_token_id
    assert int((encoded.ids == token).sum()) == FEATURES[family]
    assert family_of(policy.model.config).features(policy.core, encoded.media) == {token: FEATURES[family]}
    other = policy.prompt_encoder.encode(tiny.ask("other", "what", tiny_omni.sound(0.7, pitch=2000.0)))
    with torch.no_grad():
        read = [common.log_probabilities(policy, prompt, one.steps.ids) for prompt in (encoded, other)]
    assert (read[0] - read[1])[-one.length :].abs().max() > 1e-4


def test_the_tower_of_sounds_of_gemma_3n_stays_as_it_is(exact):
    # Its gradient is not finite in transformers 5.23 for a sound that is padded.
    policy, family = exact("gemma3n"), "gemma3n"
    row = policy.encode(prompts(family)[0], Outcome(text="fox"))
    value = policy(policy.collate((row,))).logp.sum()
    value.backward()
    learned = mixed.gradients(policy)
    assert value.isfinite() and all(gradient.isfinite().all() for gradient in learned.values())
    assert any("vision_tower" in name for name in learned)
    assert not any("audio_tower" in name for name in learned)


def test_a_sound_that_would_be_cut_off_is_refused(exact, family):
    with pytest.raises(PromptError, match="lasts 31.00 s, and this model reads sounds of 30 s; cut it"):
        exact(family).prompt_encoder.encode(tiny.ask("a", tiny_omni.sound(31.0), "x"))


def test_the_tower_of_sounds_of_gemma_4_learns_from_padded_sounds(exact):
    policy = exact("gemma4")
    words, one, both = prompts("gemma4")
    gradients = {}
    for name, asked in (("together", [words, one, both]), ("words", [words])):
        policy(policy.collate(mixed.generate(policy, asked))).logp.sum().backward()
        gradients[name] = mixed.gradients(policy)
    tower = {key: value for key, value in gradients["together"].items() if "audio_tower.layers" in key}
    assert all(value.isfinite().all() for value in gradients["together"].values())
    assert any(value.any() for value in tower.values())
    assert tower.keys() <= gradients["words"].keys(), "processes without sounds have gradients of 0"
    assert not any(value.any() for key, value in gradients["words"].items() if "audio" in key)


def test_sounds_of_gemma_4_are_told_apart_without_their_padding(exact):
    policy = exact("gemma4")
    encoded = policy.prompt_encoder.encode(prompts("gemma4")[2])
    image, *sounds = family_of(policy.model.config).split(encoded.media)
    assert image.keys() & {"pixel_values"} and len(sounds) == 2
    # 1.3 s and 0.2 s are 20800 and 3200 samples: 128 and 18 or 19 frames of 10 ms that end inside of them.
    frames = [one["input_features"].shape[1] for one in sounds]
    assert frames == [(20800 + 160 - 321) // 160 + 1, (3200 + 160 - 321) // 160 + 1]
    parts = [policy.core.get_audio_features(**one).pooler_output[0] for one in sounds]
    padded = {name: encoded.media[name] for name in sounds[0]}
    whole = policy.core.get_audio_features(**padded)
    torch.testing.assert_close(torch.cat(parts), whole.pooler_output[whole.attention_mask], rtol=0, atol=1e-5)


def test_models_of_gemma_4_without_a_tower_of_sounds_refuse_them_before_weights_are_loaded(exact, tmp_path):
    tiny_gemma.make("gemma4_26b", tmp_path)
    with pytest.raises(PromptError, match="this model of type 'gemma4' is not known to read sounds"):
        Tokens.prompt_check({"model": str(tmp_path)})(prompts("gemma4")[1])


def test_sounds_below_a_window_are_refused(exact):
    with pytest.raises(PromptError, match=r"lasts 0.0100 s, less than a window of the spectrum, 0.02 s"):
        exact("gemma4").prompt_encoder.encode(tiny.ask("a", tiny_omni.sound(0.01), "x"))
