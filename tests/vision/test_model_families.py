"""Every family says of a row what transformers say of it alone, however rows and prompts are batched."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import transformers

from mmrl.config.loading import ConfigError
from mmrl.core.types import Unit
from mmrl.vision.models.loading import load_model
from mmrl.vision.models.model_families import FAMILIES, check_family, family_of
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny
from tests.vision.family_table import makers

EVERY = pytest.mark.parametrize("family", sorted(tiny.MAKERS))
TIGHT = {"rtol": 0, "atol": 1e-10}
FLOAT = {"rtol": 1e-5, "atol": 1e-5}  # norms of transformers compute in float32, whatever the weights are


@pytest.fixture(scope="module")
def answered(exact):
    return cache(lambda family: mixed.answered(exact(family), family))


@EVERY
def test_log_probabilities_and_entropies_of_a_mixed_batch_are_those_of_every_row_alone(
    exact, answered, family
):
    policy = exact(family)
    rows = answered(family)
    batch = policy.collate(rows)
    with torch.no_grad():
        said = policy(batch, frozenset({"entropy"}))
    for i, row in enumerate(rows):
        logits = mixed.plainly(policy, row)
        logits[:, policy.prompt_encoder.placeholders] = -torch.inf
        shares = torch.distributions.Categorical(logits=logits)
        mixed.assert_close(family, said.logp[i, : row.length], shares.log_prob(row.steps.ids), **TIGHT)
        mixed.assert_close(family, said.extra["entropy"][i, : row.length], shares.entropy(), **TIGHT)
        assert batch.mask[i].tolist() == [1] * row.length + [0] * (batch.mask.shape[1] - row.length)
        assert said.logp[i, row.length :].abs().sum() == 0


@EVERY
def test_packed_prompts_give_the_values_and_gradients_of_cached_ones(exact, answered, family):
    cached, packed = exact(family), exact(family, gradient_checkpointing=True)
    assert packed.module.checkpointed and not cached.module.checkpointed
    rows = answered(family)
    results = []
    for policy in (cached, packed):
        batch = policy.collate(rows)
        value = mixed.loss(policy, batch)
        value.backward()
        results.append((policy(batch).logp.detach(), mixed.gradients(policy)))
    (logp, gradient), (other_logp, other_gradient) = results
    mixed.assert_close(family, logp, other_logp, **TIGHT)
    assert gradient.keys() == other_gradient.keys()
    for name, value in gradient.items():
        mixed.assert_close(family, other_gradient[name], value, rtol=1e-9, atol=1e-9)
    assert sum(float(value.abs().sum()) for value in gradient.values()) > 0


def test_packed_prompts_with_eager_attention_have_the_same_values(checkpoint):
    made = [
        Tokens(
            model=str(checkpoint("qwen2_5_vl")),
            dtype="float32",
            attn_implementation=attention,
            gradient_checkpointing=packed,
        )
        for attention, packed in (("sdpa", False), ("eager", True))
    ]
    rows = mixed.answered(made[0], "qwen2_5_vl")
    with torch.no_grad():
        found, wanted = (policy(policy.collate(rows)).logp for policy in reversed(made))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)


@EVERY
def test_gradients_are_those_of_every_row_alone(exact, answered, family):
    policy = exact(family)
    rows = answered(family)
    mixed.loss(policy, policy.collate(rows)).backward()
    together = mixed.gradients(policy)
    width = max(row.length for row in rows)
    weight = torch.linspace(0.5, 2.0, len(rows) * width, dtype=torch.float64).view(len(rows), width)
    for i, row in enumerate(rows):
        logp = policy(policy.collate((row,))).logp[0]
        (logp * weight[i, : row.length]).sum().backward()
    alone = mixed.gradients(policy)
    for name, value in together.items():
        mixed.assert_close(family, alone[name], value, **FLOAT)


@EVERY
def test_micro_batches_of_one_row_and_of_everything_give_the_same_gradients(exact, answered, family):
    policy = exact(family)
    rows = answered(family)
    whole = policy.collate(rows)
    group = torch.tensor([[row.prompt.uid for row in rows].index(row.prompt.uid) for row in rows])
    weight = torch.linspace(0.5, 2.0, whole.mask.numel()).view(whole.mask.shape) * whole.mask
    whole = whole.replace(group=group, weight=weight)
    results = []
    for size, count in ((1, len(rows)), (200, None), (10**6, 1)):
        micros = whole.split(size, Unit.ROW)
        assert count is None or len(micros) == count
        for micro in micros:
            (policy(micro).logp * micro.weight).sum().backward()
        results.append(mixed.gradients(policy))
    for other in results[1:]:
        for name, value in results[0].items():
            mixed.assert_close(family, other[name], value, **FLOAT)


@EVERY
def test_the_engine_notes_the_log_probabilities_and_entropies_of_the_policy(exact, family):
    policy = exact(family)
    asked = mixed.prompts(family)
    for temperature in (1.0, 0.7):
        rows = mixed.generate(policy, asked * 2, temperature=temperature)
        batch = policy.collate(rows)
        with torch.no_grad():
            said = policy(batch, frozenset({"entropy"}))
        for name, value in (("logp", said.logp), ("entropy", said.extra["entropy"])):
            inside = batch.mask.bool()
            torch.testing.assert_close(
                batch.notes[name][inside].double(), value[inside], rtol=0, atol=2e-5, msg=name
            )


@EVERY
def test_greedy_answers_are_those_of_transformers(exact, family):
    policy = exact(family)
    rows = mixed.generate(policy, mixed.prompts(family), temperature=0.0)
    assert len({tuple(row.steps.ids.tolist()) for row in rows}) > 2
    for row in rows:
        ids, encoded = row.steps.prompt.ids[None], row.steps.prompt
        wanted = policy.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=policy.prompt_encoder.end,
            pad_token_id=0,
            suppress_tokens=policy.prompt_encoder.placeholders,
            **(encoded.media | mixed.placed(policy, encoded)),
        )[0, ids.shape[1] :]
        assert row.steps.ids.tolist() == wanted.tolist()


@EVERY
def test_an_answer_depends_on_neither_the_batch_nor_its_size(exact, family):
    policy = exact(family)
    asked = mixed.prompts(family)
    together = mixed.generate(policy, asked * 2)
    apart = mixed.generate(policy, asked * 2, batch_size=1)
    turned = mixed.generate(policy, asked[::-1] * 2)[::-1]
    again = [*turned[len(asked) :], *turned[: len(asked)]]
    for row, other, third in zip(together, apart, again, strict=True):
        assert row.steps.ids.tolist() == other.steps.ids.tolist() == third.steps.ids.tolist()
        torch.testing.assert_close(row.notes["logp"], other.notes["logp"], rtol=0, atol=1e-5)
    assert len({tuple(row.steps.ids.tolist()) for row in together}) > len(asked)


@EVERY
def test_a_text_only_batch_touches_every_parameter_of_a_trained_tower(exact, family):
    policy = exact(family, freeze_vision_tower=False)
    words, picture, *_ = mixed.prompts(family)
    used = set()
    for asked in (picture, words):
        (row,) = mixed.generate(policy, [asked])
        policy(policy.collate((row,))).logp.sum().backward()
        found = mixed.gradients(policy)
        # What an image never reaches (a last norm that no layer reads) is not asked of words either.
        assert used <= found.keys()
        used = set(found)
    tower = [name for name in used if "visual" in name or "vision" in name]
    assert len(tower) > 10
    assert all(float(found[name].abs().sum()) == 0 for name in tower)


@EVERY
def test_a_video_touches_every_parameter_of_a_trained_tower_as_well(exact, family):
    if family in tiny.WITH_VIDEO:
        policy = exact(family, freeze_vision_tower=False)
        _, picture, _, clip, *_ = mixed.prompts(family)
        touched = []
        for asked in (picture, clip):
            (row,) = mixed.generate(policy, [asked])
            policy(policy.collate((row,))).logp.sum().backward()
            touched.append(mixed.gradients(policy).keys())
        assert touched[0] == touched[1]


def test_a_family_that_is_not_listed_is_read_in_line():
    config = copy.copy(type("Config", (), {"model_type": "never_heard_of"})())
    positions = family_of(config).positions(None, {"input_ids": torch.zeros(1, 3)})
    assert positions.tolist() == [[0, 1, 2]]
    assert family_of(config).features(None, {"pixel_values": torch.zeros(1)}) == {}


def test_models_that_would_be_read_otherwise_are_refused_before_their_weights_are_loaded(tmp_path):
    names = ("gemma3", "glm_ocr", "gemma4_unified", "llava_next")
    core = {name: transformers.MODEL_MAPPING[type(transformers.AutoConfig.for_model(name))] for name in names}
    for name, reads in (
        ("glm_ocr", "positions of its own"),
        ("gemma4_unified", "`mm_token_type_ids`"),
    ):
        with pytest.raises(ConfigError, match=f"'{name}' reads {reads}.* which is known of .*gemma3, "):
            check_family(transformers.AutoConfig.for_model(name), core[name])
    for name in ("mamba2", "recurrent_gemma"):
        config = transformers.AutoConfig.for_model(name)
        with pytest.raises(ConfigError, match=f"layers of a model of type '{name}' keep a state, from which"):
            check_family(config, transformers.MODEL_MAPPING[type(config)], text_only=True)
    for name in ("gemma3", "llava_next"):  # listed, and one that reads nothing else
        check_family(transformers.AutoConfig.for_model(name), core[name])
    transformers.GlmOcrConfig().save_pretrained(tmp_path)  # and no weights
    with pytest.raises(ValueError, match="cannot load the model .*'glm_ocr' reads positions of its own"):
        load_model(str(tmp_path), dtype="float32", attn_implementation="sdpa")


def test_every_family_that_is_listed_has_a_tiny_checkpoint_or_shares_a_record():
    made = makers().keys()
    alike = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5_moe": "qwen3_5", "glm4v": "glm46v", "glm4v_moe": "glm46v"}
    assert {name for name in FAMILIES if name not in made} == set(alike)
    assert made <= FAMILIES.keys()
    assert all(FAMILIES[name] == FAMILIES[other] for name, other in alike.items())
