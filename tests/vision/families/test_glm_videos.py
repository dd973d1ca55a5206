"""Videos of GLM-V, whose frames are read as images, against the model's own reading of videos."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from mmrl.core.rng import seeded
from mmrl.vision.checks.forward_agreement import forward_agreement
from mmrl.vision.checks.prompt_agreement import as_transformers
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny
from tests.vision.test_media_conditioning import examined

EVERY = pytest.mark.parametrize("family", ["glm46v", "glm4v", "glm4v_moe"])
WITHIN = {"glm46v": 1e-10, "glm4v": 1e-10, "glm4v_moe": 1e-6}  # routers compute in float32
CLIPS = (
    tiny.ask("clip", tiny.clip(4), "when"),
    tiny.ask("odd", "is", tiny.clip(3, seed=1), "like", tiny.clip(6, seed=2, side=28), "or not?"),
)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Load a policy in float64 with a trained tower, once for all tests; nobody changes its weights."""

    def load(family: str) -> Tokens:
        folder = tmp_path_factory.mktemp(family)
        with seeded(0):
            tiny._glm(folder, family)
        policy = Tokens(model=str(folder), dtype="float64", freeze_vision_tower=False)
        policy.model.set_experts_implementation("eager")  # others have no float64
        return policy

    return cache(load)


def plainly(policy, row):
    """Compute log-probabilities of an answer with the tensors of videos that the processor makes."""
    inputs, answer = as_transformers(policy.prompt_encoder, row.prompt), row.steps.ids
    for name, more in (("input_ids", answer), ("mm_token_type_ids", torch.zeros_like(answer))):
        inputs[name] = torch.cat([inputs[name], more[None].to(inputs[name])], 1)
    del inputs["attention_mask"]
    logits = policy.model(**inputs, use_cache=False).logits[0, -len(answer) - 1 : -1]
    hidden = torch.tensor(policy.prompt_encoder.placeholders)
    logp = logits.index_fill(-1, hidden, -torch.inf).log_softmax(-1)
    return logp.gather(-1, answer[:, None])[:, 0]


@EVERY
def test_tokens_pixels_and_positions_are_those_of_the_model(exact, family):
    policy = exact(family)
    for prompt in CLIPS:
        plain, encoded = as_transformers(policy.prompt_encoder, prompt), policy.prompt_encoder.encode(prompt)
        assert torch.equal(encoded.ids, plain["input_ids"][0])
        assert torch.equal(encoded.media["pixel_values"], plain["pixel_values_videos"])
        del plain["attention_mask"], plain["pixel_values_videos"]
        assert torch.equal(encoded.positions, policy.core.get_rope_index(**plain)[0][:, 0])
        steps = plain["video_grid_thw"][:, 0]
        assert encoded.media["image_grid_thw"].shape == (int(steps.sum()), 3) and steps.tolist()[0] == 2


@EVERY
def test_values_and_gradients_of_images_and_videos_together_are_those_of_each_alone(exact, family):
    policy = exact(family)
    asked = [*mixed.prompts("gemma3"), *CLIPS]  # words, one and two images
    rows = mixed.generate(policy, asked)
    batch = policy.collate(rows)
    mixed.loss(policy, batch).backward()
    ours, logp = mixed.gradients(policy), policy(batch).logp
    weight = torch.linspace(0.5, 2.0, logp.numel(), dtype=logp.dtype).view(logp.shape)
    for i, row in enumerate(rows):
        wanted = plainly(policy, row)
        torch.testing.assert_close(logp[i, : row.length], wanted, rtol=0, atol=WITHIN[family])
        (wanted * weight[i, : row.length]).sum().backward()
    for name, value in mixed.gradients(policy).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=name)


@EVERY
def test_greedy_answers_are_those_of_the_model(exact, family):
    policy = exact(family)
    for row in mixed.generate(policy, [*CLIPS], temperature=0.0):
        inputs = as_transformers(policy.prompt_encoder, row.prompt)
        wanted = policy.model.generate(
            **inputs,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=policy.prompt_encoder.end,
            pad_token_id=0,
            suppress_tokens=policy.prompt_encoder.placeholders,
        )[0, inputs["input_ids"].shape[1] :]
        assert row.steps.ids.tolist() == wanted.tolist()
    assert not list(forward_agreement(examined(policy, *CLIPS), rows=9, tolerance=1e-6))


def test_images_beside_a_video_stay_in_order(exact):
    encoder = exact("glm46v").prompt_encoder
    media = [
        tiny.picture(seed=1),
        tiny.clip(4, seed=2),
        tiny.picture(seed=3, width=112),
        tiny.clip(2, seed=4),
    ]
    alone = [encoder.encode(tiny.ask(f"alone{i}", medium, "what")).media for i, medium in enumerate(media)]
    both = encoder.encode(tiny.ask("both", "a", *media, "what")).media
    assert both.keys() == {"pixel_values", "image_grid_thw"}
    for name, value in both.items():
        assert torch.equal(value, torch.cat([one[name] for one in alone]))


def test_a_template_without_the_tokens_around_a_video_is_named(exact, tmp_path, monkeypatch):
    encoder = exact("glm46v").prompt_encoder
    without = encoder.processor.chat_template.replace("<|begin_of_video|>", "")
    monkeypatch.setattr(encoder.processor, "chat_template", without)
    with pytest.raises(
        ValueError, match=r"has 2 runs of image .* and 0 of video .* 0 images and 2 video fra"
    ):
        encoder.encode(tiny.ask("bare", tiny.clip(4, seed=5), "when"))
