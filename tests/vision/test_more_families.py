"""Families of images in one sequence with positions in a line, each compared with plain transformers."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from mmrl.vision.checks.forward_agreement import forward_agreement
from mmrl.vision.checks.media_conditioning import media_conditioning
from mmrl.vision.models.model_families import family_of
from mmrl.vision.models.processor import OF_TOKENS
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny, tiny_more
from tests.vision.test_decoding_turns import converse, same
from tests.vision.test_media_conditioning import examined
from tests.vision.test_turns import collated

NAMES = sorted({**tiny_more.MAKERS, **tiny_more.VARIANTS})
EVERY = pytest.mark.parametrize("family", NAMES)
FEW = ("lfm2_vl", "mistral3")
TIGHT = {"rtol": 0, "atol": 1e-10}
SIZES = ((56, 56), (56, 112), (112, 56), (30, 100), (28, 56), (97, 41))


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Load a policy in float64, once for all tests; nobody changes its weights."""
    transformers.utils.logging.disable_progress_bar()
    folder = cache(lambda family: tiny_more.make(family, tmp_path_factory.mktemp(family)))

    def load(family: str, **options) -> Tokens:
        policy = Tokens(model=str(folder(family)), dtype="float64", freeze_vision_tower=False, **options)
        stream = torch.Generator().manual_seed(0)
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:  # peft begins with 0, which changes nothing
                parameter.data.normal_(0, 0.1, generator=stream)
        return policy

    return cache(load)


def log_probabilities(policy, ids, media):
    """What transformers say of the tokens of one row: one sequence, no padding, no cache."""
    logits = policy.model(input_ids=ids[None], use_cache=False, **media).logits[0, :-1]
    # Granite Vision and the models of Cohere were trained with scaled logits; transformers leave it out.
    text = policy.model.config.text_config
    logits = logits * getattr(text, "logit_scale", 1.0) / getattr(text, "logits_scaling", 1.0)
    forbidden = torch.tensor(policy.prompt_encoder.placeholders)
    logp = logits.index_fill(-1, forbidden, -torch.inf).log_softmax(-1)
    return logp.gather(-1, ids[1:, None])[:, 0]


@EVERY
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora_rank": 2}], ids=str)
def test_values_and_gradients_are_those_of_transformers(exact, family, options):
    policy = exact(family, **options)
    rows = mixed.answered(exact(family), family)  # without, with one and with two images
    assert [bool(row.prompt.media) for row in rows[:3]] == [False, True, True]
    batch = policy.collate(rows)
    said = policy(batch)
    weight = torch.linspace(0.5, 2.0, said.logp.numel(), dtype=torch.float64).view(said.logp.shape)
    (said.logp * weight * batch.mask).sum().backward()
    ours = mixed.gradients(policy)
    for i, row in enumerate(rows):
        ids = torch.cat([row.steps.prompt.ids, row.steps.ids])
        logp = log_probabilities(policy, ids, row.steps.prompt.media)[-row.length :]
        torch.testing.assert_close(said.logp[i, : row.length], logp, **TIGHT)
        (logp * weight[i, : row.length]).sum().backward()
    wanted = mixed.gradients(policy)
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        # Norms of transformers compute in float32, whatever the weights are.
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=name)
    learned = {name for name, value in wanted.items() if value.any()}
    assert any("vision" in name for name in learned) and any("layers.1.mlp" in name for name in learned)


@EVERY
def test_greedy_answers_are_those_of_transformers(exact, family):
    policy = exact(family)
    rows = mixed.generate(policy, mixed.prompts(family), temperature=0.0)
    assert len({tuple(row.steps.ids.tolist()) for row in rows}) > 1
    for row in rows:
        ids = row.steps.prompt.ids[None]
        wanted = policy.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=policy.prompt_encoder.end,
            pad_token_id=0,
            suppress_tokens=policy.prompt_encoder.placeholders,
            **row.steps.prompt.media,
        )[0, ids.shape[1] :]
        assert row.steps.ids.tolist() == wanted.tolist()


@EVERY
def test_the_number_of_features_is_that_of_the_model_for_every_size(exact, family):
    policy = exact(family)
    rule = family_of(policy.model.config).features
    for height, width in SIZES:
        inputs = policy.prompt_encoder.processor_inputs(
            tiny.ask("one", tiny.picture(height=height, width=width), "what")
        )
        ids = inputs.pop("input_ids")
        inputs = {name: value for name, value in inputs.items() if name not in OF_TOKENS}
        features = policy.core.get_image_features(**inputs, return_dict=True).pooler_output
        count = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in features)
        token = policy.model.config.image_token_id
        assert rule(policy.core, {**inputs, "input_ids": ids}) == {token: count}
        assert int((ids == token).sum()) == count


@EVERY
def test_a_prompt_with_fewer_placeholders_than_features_is_refused(exact, family, monkeypatch):
    encoder = exact(family).prompt_encoder
    asked = tiny.ask("one", tiny.picture(height=56, width=112), "what")
    inputs = encoder.processor_inputs(asked)
    seen = inputs["input_ids"] == encoder.core.config.image_token_id
    words = f"has {seen.sum() - 1} placeholder tokens .* for {seen.sum()} media features"
    fewer = inputs | {"input_ids": inputs["input_ids"].masked_fill(seen.cumsum(1) == 1, 0)}
    monkeypatch.setattr(encoder, "processor", lambda **_: fewer)
    with pytest.raises(ValueError, match=words):
        encoder._inputs(asked, "", {}, {})


@EVERY
def test_a_question_in_words_leaves_no_parameter_of_the_tower_without_a_gradient(exact, family):
    policy = exact(family)
    words, picture, *_ = mixed.prompts(family)
    used = []
    for asked in (picture, words):
        (row,) = mixed.generate(policy, [asked])
        policy(policy.collate((row,))).logp.sum().backward()
        used.append(mixed.gradients(policy))
    assert used[0].keys() <= used[1].keys()
    assert not any(value.any() for name, value in used[1].items() if "vision" in name)


@EVERY
def test_images_in_replies_are_read_as_transformers_read_them(exact, family):
    policy = exact(family)
    batch, made = collated(policy, family)
    with torch.no_grad():
        said = policy(batch).logp
        for i, (row, read, last) in enumerate(made):
            first = len(row.steps.prompt.ids)
            chosen = row.steps.suffix.chosen if row.steps.suffix else torch.arange(row.length)
            wanted = log_probabilities(policy, torch.cat([read.ids, last]), read.media)[first - 1 + chosen]
            torch.testing.assert_close(said[i, : row.length], wanted, **TIGHT)


@pytest.mark.parametrize(
    "family", [one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in NAMES]
)
def test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family):
    policy = exact(family)
    asked = [prompt for prompt in mixed.prompts(family) for _ in range(3)]
    rows = converse(policy, asked)
    same(rows, converse(policy, asked, kept=False))
    assert len({row.outcomes[-1].tags["turn"] for row in rows}) > 1


@EVERY
def test_the_doctor_finds_no_difference_from_transformers(exact, family):
    asked = examined(exact(family), *mixed.prompts(family))
    assert not list(forward_agreement(asked, rows=9, tolerance=1e-6))
    assert not list(media_conditioning(asked, rows=9)), "the comparison would show nothing"


def test_an_image_of_one_feature_is_refused_by_mistral3_when_it_is_alone(exact):
    policy = exact("mistral3")
    small = tiny.picture(height=28, width=28)
    with pytest.raises(ValueError, match="at most 28 x 28 pixels cannot be read alone .* enlarge it"):
        policy.prompt_encoder.encode(tiny.ask("one", small, "what"))
    (row,) = mixed.generate(policy, [tiny.ask("two", small, tiny.picture(seed=1), "what")])
    assert row.length
