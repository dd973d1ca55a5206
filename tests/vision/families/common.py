"""Comparisons of a family with plain transformers, shared by the test files of families.

A test file imports the tests that it wants, and defines two fixtures: `exact = loader(make)`, which loads a
checkpoint in float64, and `family`, the name of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from inspect import signature
from pathlib import Path

import pytest
import torch
import transformers

from mmrl.vision.checks.forward_agreement import forward_agreement
from mmrl.vision.checks.media_conditioning import media_conditioning
from mmrl.vision.checks.prompt_agreement import as_transformers
from mmrl.vision.models.model_families import family_of
from mmrl.vision.models.processor import OF_TOKENS
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny
from tests.vision.test_decoding_turns import converse, same
from tests.vision.test_media_conditioning import examined
from tests.vision.test_turns import collated

TIGHT = {"rtol": 0, "atol": 1e-10}
SIZES = ((56, 56), (56, 112), (112, 56), (30, 100), (28, 56), (97, 41))


def loader(
    make: Callable[[str, Path], Path],
    prepare: Callable[[Tokens], None] = lambda policy: None,
    attention: dict[str, str] | None = None,
):
    """Make the fixture that loads a policy in float64, once for a test file; nobody changes its weights.

    `make` writes the checkpoint of a family to a folder; `prepare` changes a loaded policy; `attention` names
    the attention of families that have no sdpa.
    """

    @pytest.fixture(scope="module")
    def exact(tmp_path_factory):
        transformers.utils.logging.disable_progress_bar()
        folder = cache(lambda family: make(family, tmp_path_factory.mktemp(family)))

        def load(family: str, **options) -> Tokens:
            options.setdefault("attn_implementation", (attention or {}).get(family, "sdpa"))
            policy = Tokens(model=str(folder(family)), dtype="float64", freeze_vision_tower=False, **options)
            stream = torch.Generator().manual_seed(0)
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:  # peft begins with 0, which changes nothing
                    parameter.data.normal_(0, 0.1, generator=stream)
            prepare(policy)
            return policy

        return cache(load)

    return exact


@lru_cache(2)
def answered(exact, family):
    """Make the rows of a family, once for all options."""
    return mixed.answered(exact(family), family)


def weights(mask):
    """Weigh every step differently, so that no error in one can hide in another."""
    return torch.linspace(0.5, 2.0, mask.numel(), dtype=torch.float64).view(mask.shape)


@lru_cache(2)
def by_transformers(exact, family, **adapter):
    """Compute log-probabilities and gradients of these rows by transformers, once with each adapter."""
    policy, rows = exact(family, **adapter), answered(exact, family)
    weight, found = weights(policy.collate(rows).mask), []
    for i, row in enumerate(rows):
        found.append(log_probabilities(policy, row.steps.prompt, row.steps.ids)[-row.length :])
        (found[-1] * weight[i, : row.length]).sum().backward()
    return [logp.detach() for logp in found], mixed.gradients(policy)


def log_probabilities(policy, read, answer):
    """Log-probabilities by transformers of all tokens of one row: one sequence, no padding, no cache.

    `read` is the encoded prompt, or the input of the last turn, and `answer` the tokens after it.
    """
    ids = torch.cat([read.ids, answer])
    inputs = {**read.media, **mixed.placed(policy, read, len(answer))}
    logits = policy.model(input_ids=ids[None], use_cache=False, **inputs).logits[0, :-1]
    # Granite Vision and the models of Cohere were trained with scaled logits; transformers leave it out.
    text = policy.model.config.text_config
    logits = logits * getattr(text, "logit_scale", 1.0) / getattr(text, "logits_scaling", 1.0)
    forbidden = torch.tensor(policy.prompt_encoder.placeholders, dtype=torch.int64)
    logp = logits.index_fill(-1, forbidden, -torch.inf).log_softmax(-1)
    return logp.gather(-1, ids[1:, None].clamp(max=logp.shape[-1] - 1))[
        :, 0
    ]  # tokens of media may lie outside


def test_tokens_and_pixels_are_those_of_the_processor(exact, family):
    encoder = exact(family).prompt_encoder
    for prompt in mixed.prompts(family):
        plain = family_of(encoder.core.config).prepare(as_transformers(encoder, prompt))
        encoded = encoder.encode(prompt)
        inputs = {**encoded.media, "input_ids": encoded.ids[None]}
        assert inputs.keys() == plain.keys() - {*OF_TOKENS} | {"input_ids"}
        assert all(torch.equal(value, plain[name]) for name, value in inputs.items())


LORA = pytest.param({"lora_rank": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, LORA], ids=str)
def test_values_and_gradients_are_those_of_transformers(exact, family, options):
    policy, rows = exact(family, **options), answered(exact, family)
    assert {1, 2} <= {len(row.prompt.media) for row in rows}  # most families: also without
    batch = policy.collate(rows)
    said = policy(batch).logp
    (said * weights(batch.mask) * batch.mask).sum().backward()
    ours = mixed.gradients(policy)
    logp, wanted = by_transformers(exact, family, **({} if "gradient_checkpointing" in options else options))
    for i, row in enumerate(rows):
        mixed.assert_close(family, said[i, : row.length], logp[i], **TIGHT)
    # Experts for media in the last layer change no answer; towers of media that no row has get zeros here.
    for one, other in ((ours, wanted), (wanted, ours)):
        assert not any(one[name].any() for name in one.keys() - other.keys())
    for name in ours.keys() & wanted.keys():
        # Norms of transformers compute in float32, whatever the weights are.
        mixed.assert_close(family, ours[name], wanted[name], rtol=1e-5, atol=1e-5, msg=name)
    learned = {name for name, value in wanted.items() if value.any()}
    assert all(any(part in name for name in learned) for part in ("vis", "layers.1."))


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
            **(row.steps.prompt.media | mixed.placed(policy, row.steps.prompt)),
        )[0, ids.shape[1] :]
        assert row.steps.ids.tolist() == wanted.tolist()


def test_the_number_of_features_is_that_of_the_model_for_every_size(exact, family):
    policy = exact(family)
    rule = family_of(policy.model.config).features
    for height, width in SIZES:
        inputs = policy.prompt_encoder.processor_inputs(
            tiny.ask("one", tiny.picture(height=height, width=width), "what")
        )
        ids = inputs.pop("input_ids")
        types = {name: inputs.pop(name) for name in OF_TOKENS if name in inputs}
        shown = family_of(policy.model.config).assemble(policy.core, inputs)
        takes = signature(policy.core.get_image_features).parameters
        shown = {name: value for name, value in shown.items() if name in takes}
        features = policy.core.get_image_features(**shown, return_dict=True).pooler_output
        count = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in features)
        token = policy.model.config.image_token_id
        assert rule(policy.core, {**types, **inputs, "input_ids": ids}) == {token: count}
        assert int((ids == token).sum()) == count


def test_a_prompt_with_fewer_placeholders_than_features_is_refused(exact, family, monkeypatch):
    encoder = exact(family).prompt_encoder
    asked = tiny.ask("one", tiny.picture(height=56, width=112), "what")
    inputs = as_transformers(encoder, asked)
    seen = inputs["input_ids"] == encoder.core.config.image_token_id
    words = f"has {seen.sum() - 1} placeholder tokens .* for {seen.sum()} media features"
    for name in inputs.keys() & {*OF_TOKENS}:
        inputs[name] = inputs[name].masked_fill(seen & (seen.cumsum(1) == 1), 0)
    monkeypatch.setattr(encoder, "processor", lambda **_: inputs)
    with pytest.raises(ValueError, match=words):
        encoder._inputs(asked, "", {}, {})


def test_a_question_in_words_leaves_no_parameter_of_the_tower_without_a_gradient(exact, family):
    policy = exact(family)
    words, picture, *_ = mixed.prompts(family)
    used = []
    for asked in (picture, words):
        (row,) = mixed.generate(policy, [asked])
        policy(policy.collate((row,))).logp.sum().backward()
        used.append(mixed.gradients(policy))
    tower = {name for name in used[0] if "vision_moe" not in name}  # experts of Ernie's language model
    assert tower <= used[1].keys()
    assert not any(value.any() for name, value in used[1].items() if "vis" in name)


def test_images_in_replies_are_read_as_transformers_read_them(exact, family):
    policy = exact(family)
    batch, made = collated(policy, family)
    with torch.no_grad():
        said = policy(batch).logp
        for i, (row, read, last) in enumerate(made):
            first = len(row.steps.prompt.ids)
            chosen = row.steps.suffix.chosen if row.steps.suffix else torch.arange(row.length)
            wanted = log_probabilities(policy, read, last)[first - 1 + chosen]
            mixed.assert_close(family, said[i, : row.length], wanted, **TIGHT)


def test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family, told=False):
    policy = exact(family)
    asked = [prompt for prompt in mixed.prompts(family)[:3] for _ in range(2)]
    rows = converse(policy, asked, told=told)
    same(rows, converse(policy, asked, told=told, kept=False))
    assert len({row.outcomes[-1].tags["turn"] for row in rows}) > 1


def test_the_doctor_finds_no_difference_from_transformers(exact, family):
    asked = examined(exact(family), *mixed.prompts(family))
    assert not list(forward_agreement(asked, rows=9, tolerance=1e-6 + tiny.IN_FLOAT32.get(family, 0)))
    assert not list(media_conditioning(asked, rows=9)), "the comparison would show nothing"
