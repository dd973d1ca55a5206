"""The engine: settings from zero, rows that leave when they are done, and notes that fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import DynamicCache

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core import onednn as module
from mmrl.core.rng import Stream
from mmrl.vision.engines.generate import Generate, mean_over_parts
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny

FAMILY = "qwen2_5_vl"


@pytest.fixture
def policy(exact):
    return exact(FAMILY)


def said(rows):
    return [row.steps.ids.tolist() for row in rows]


def test_every_entry_is_answered_in_order_with_its_notes(policy):
    asked = mixed.prompts(FAMILY)
    order = [asked[2], asked[0], asked[2], asked[3]]
    rows = mixed.generate(policy, order)
    assert [row.prompt.uid for row in rows] == [prompt.uid for prompt in order]
    for row in rows:
        assert row.group == row.prompt.uid
        assert row.on_policy
        assert row.length == len(row.steps.ids) == len(row.notes["logp"]) == len(row.notes["entropy"])
        assert row.notes["token"].tolist() == row.steps.ids.tolist()
        (outcome,) = row.outcomes
        assert outcome.end == row.length
        assert outcome.text == policy.prompt_encoder.text(row.steps.ids)
    # Entries of one prompt draw different numbers.
    assert said(rows)[0] != said(rows)[2]


def test_draws_are_those_of_the_stream_alone(policy):
    asked = mixed.prompts(FAMILY)
    first, again, other = (mixed.generate(policy, asked, seed=seed) for seed in (0, 0, 1))
    assert said(first) == said(again) != said(other)
    stream = Stream(0)
    engine = Generate(policy, stream=stream, max_completion_length=8)
    assert said(engine.rollout(asked)) == said(first)
    stream.step = 1
    assert said(engine.rollout(asked)) != said(first)


def test_an_answer_ends_with_its_end_token_or_at_the_limit(policy, monkeypatch):
    # With every second token an end token, half the rows end at every step.
    monkeypatch.setattr(policy.prompt_encoder, "end", [policy.prompt_encoder.end[0], *range(0, 256, 2)])
    rows = mixed.generate(policy, mixed.prompts(FAMILY) * 4, max_completion_length=3)
    lengths = {row.length for row in rows}
    assert lengths == {1, 2, 3}
    for row in rows:
        ends = [token in policy.prompt_encoder.end for token in row.steps.ids.tolist()]
        assert not any(ends[:-1])
        assert row.outcomes[0].tags["finish"] == ("stop" if ends[-1] else "length")


def test_rows_that_are_done_leave_the_batch_and_change_nothing(policy, monkeypatch):
    # One token in five ends an answer, so rows leave one after the other.
    monkeypatch.setattr(policy.prompt_encoder, "end", [policy.prompt_encoder.end[0], *range(0, 256, 5)])
    asked = mixed.prompts(FAMILY) * 4
    sizes = []
    hook = policy.core.register_forward_pre_hook(
        lambda module, inputs, named: sizes.append(len(named["input_ids"])), with_kwargs=True
    )
    together = mixed.generate(policy, asked, max_completion_length=12)
    hook.remove()
    # Distinct prompts pass once, then all rows, then fewer and fewer.
    assert sizes[0] == len(asked) // 4
    assert sizes[1] == len(asked)
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert sizes[-1] < len(asked) // 2
    apart = mixed.generate(policy, asked, max_completion_length=12, batch_size=1)
    assert said(together) == said(apart)
    for row, other in zip(together, apart, strict=True):
        for name in ("logp", "entropy"):
            torch.testing.assert_close(row.notes[name], other.notes[name], rtol=0, atol=1e-5)
    batch = policy.collate(together)
    with torch.no_grad():
        logp = policy(batch).logp
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=2e-5)


def test_a_batch_whose_rows_are_all_done_stops(policy, monkeypatch):
    monkeypatch.setattr(policy.prompt_encoder, "end", list(range(300)))
    calls = []
    hook = policy.core.register_forward_pre_hook(lambda *inputs: calls.append(1))
    rows = mixed.generate(policy, mixed.prompts(FAMILY), max_completion_length=50)
    hook.remove()
    assert len(calls) == 2  # the prompts, and one token
    assert {row.length for row in rows} == {1}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_the_size_of_a_batch_bounds_rows_and_changes_no_answer(policy, size):
    asked = mixed.prompts(FAMILY) * 2
    sizes = []
    hook = policy.core.register_forward_pre_hook(
        lambda module, inputs, named: sizes.append(len(named["input_ids"])), with_kwargs=True
    )
    rows = mixed.generate(policy, asked, max_completion_length=3, batch_size=size)
    hook.remove()
    assert max(sizes) <= size
    assert said(rows) == said(mixed.generate(policy, asked, max_completion_length=3))


@pytest.mark.parametrize("family", sorted(tiny.MAKERS))
def test_media_placeholders_are_never_generated(exact, family, monkeypatch):
    policy = exact(family)
    head = policy.model.get_output_embeddings()
    bias = torch.zeros(head.weight.shape[0], dtype=torch.float64)
    bias[policy.prompt_encoder.placeholders] = 100.0
    hook = head.register_forward_hook(lambda module, inputs, output: output + bias)
    asked = mixed.prompts(family)[:2]
    rows = [*mixed.generate(policy, asked * 4), *mixed.generate(policy, asked, temperature=0.0)]
    batch = policy.collate(rows)
    with torch.no_grad():
        logp = policy(batch).logp
    hook.remove()
    assert policy.prompt_encoder.placeholders
    assert not {token for ids in said(rows) for token in ids} & set(policy.prompt_encoder.placeholders)
    assert len({token for ids in said(rows) for token in ids}) > 8
    # Policy and engine agree that they have no share.
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=2e-5)


def test_the_generation_config_of_a_checkpoint_changes_nothing(checkpoint, policy, tmp_path):
    folder = tmp_path / "odd"
    shutil.copytree(checkpoint(FAMILY), folder)
    odd = {
        "do_sample": True,
        "temperature": 0.01,
        "top_k": 1,
        "top_p": 0.1,
        "repetition_penalty": 9.0,
        "no_repeat_ngram_size": 1,
        "max_length": 3,
        "max_new_tokens": 1,
        "min_new_tokens": 7,
        "eos_token_id": list(range(200)),
        "suppress_tokens": list(range(100)),
        "num_beams": 4,
    }
    (folder / "generation_config.json").write_text(json.dumps(odd))
    other = Tokens(model=str(folder), dtype="float64")
    assert other.model.generation_config.repetition_penalty == 9.0
    asked = mixed.prompts(FAMILY)
    for settings in ({}, {"temperature": 0.0}):
        wanted, got = (mixed.generate(one, asked, **settings) for one in (policy, other))
        assert said(got) == said(wanted)
        for row, same in zip(got, wanted, strict=True):
            assert torch.equal(row.notes["logp"], same.notes["logp"])


def test_settings_of_sampling_reach_the_draw(policy):
    asked = mixed.prompts(FAMILY)
    greedy = said(mixed.generate(policy, asked, temperature=0.0))
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999999}, {"temperature": 1e-6}):
        assert said(mixed.generate(policy, asked, **settings)) == greedy
    assert said(mixed.generate(policy, asked)) != greedy


def test_a_setting_may_change_between_collections(policy):
    engine = Generate(policy, stream=Stream(0), max_completion_length=8)
    asked = mixed.prompts(FAMILY)
    before = said(engine.rollout(asked))
    engine.temperature = 0.0
    assert said(engine.rollout(asked)) == said(mixed.generate(policy, asked, temperature=0.0)) != before


def test_the_temperature_of_a_row_is_that_it_was_drawn_at(policy):
    asked = mixed.prompts(FAMILY)[:1]
    hot, cold, greedy = (mixed.generate(policy, asked, temperature=t)[0] for t in (2.0, 0.5, 0.0))
    batch = policy.collate((hot, cold, greedy))
    assert batch.steps.temperature.tolist() == [2.0, 0.5, 1.0]
    with torch.no_grad():
        logp = policy(batch).logp
    for i, row in enumerate((hot, cold, greedy)):
        torch.testing.assert_close(row.notes["logp"].double(), logp[i, : row.length], rtol=0, atol=2e-5)


def test_keys_and_values_are_held_by_the_cache_that_is_named(policy):
    made = []

    class Counted(DynamicCache):
        pass

    def cache(config, visual, mask):
        assert visual.shape == mask.shape == (len(asked), max(len(row.steps.prompt.ids) - 1 for row in rows))
        for one, row in zip(visual.sum(1).tolist(), rows, strict=True):
            assert one == row.steps.prompt.ids.eq(policy.model.config.image_token_id).sum() + (
                row.steps.prompt.ids.eq(policy.model.config.video_token_id).sum()
            )
        assert mask.sum(1).tolist() == [len(row.steps.prompt.ids) - 1 for row in rows]
        made.append(Counted(config=config))
        return made[-1]

    asked = mixed.prompts(FAMILY)
    rows = mixed.generate(policy, asked)
    assert said(rows) == said(mixed.generate(policy, asked, cache=cache))
    assert len(made) == 1


def test_generating_leaves_a_model_that_recomputes_its_layers_as_it_was(exact):
    policy = exact(FAMILY, gradient_checkpointing=True)
    training = [module for module in policy.model.modules() if module.training]
    rows = mixed.generate(policy, mixed.prompts(FAMILY))
    assert said(rows) == said(mixed.generate(exact(FAMILY), mixed.prompts(FAMILY)))
    assert training and training == [module for module in policy.model.modules() if module.training]


def test_confidence_is_that_of_the_likely_tokens_averaged_over_parts():
    # parts (1, 2) and (6), whose means are 1.5 and 6
    assert mean_over_parts(["a", "b\n\n", "c"], [1.0, 2.0, 6.0]) == 3.75
    assert mean_over_parts(["a", "\n", " \n", "c", ""], [1.0, 2.0, 3.0, 4.0, 6.0]) == 3.5
    assert mean_over_parts(["a\nb", "c"], [1.0, 2.0]) == 1.5
    assert mean_over_parts(["\n\n"], [3.0]) == 3.0


def test_the_confidence_of_an_answer_is_recorded_where_it_is_asked_for(policy):
    asked = mixed.prompts(FAMILY)[:1]
    (plain,) = mixed.generate(policy, asked, max_completion_length=1)
    assert plain.outcomes[0].recorded == {}
    (row,) = mixed.generate(policy, asked, max_completion_length=1, confidence_top_k=3, temperature=2.0)
    with torch.no_grad():
        reader = Generate(policy, stream=Stream()).reader([row.steps.prompt])
        logp = (reader.read(None) / 2).log_softmax(-1)[0]
    wanted = -float(logp.sort().values[-3:].mean())
    assert row.outcomes[0].recorded["confidence"] == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(ConfigError, match="higher where the model is less sure"):
        Generate(policy, stream=Stream(), confidence_top_k=1)


def test_no_prompts_are_answered_by_no_rows(policy):
    assert mixed.generate(policy, []) == ()


def test_options_outside_their_range_are_configuration_errors():
    for settings in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_completion_length": 0}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            Pieces(Stream(0)).check("engine", Piece("vision.generate", settings))


def test_videos_of_different_lengths_that_a_model_cannot_read_together_are_an_error_that_says_so(exact):
    policy = exact("llava_onevision")
    asked = [tiny.ask("a", tiny.clip(4), "when"), tiny.ask("b", tiny.clip(6), "when")]
    with pytest.raises(ValueError, match=r"one number of frames together, not of \[4, 6\]"):
        mixed.generate(policy, asked)
    assert len(mixed.generate(policy, asked, batch_size=1)) == 2


@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 2}])
def test_packed_weights_give_the_same_answers_and_are_left_behind(checkpoint, monkeypatch, adapter):
    single = Tokens(model=str(checkpoint(FAMILY)), dtype="float32", **adapter)
    plain = mixed.generate(single, mixed.prompts(FAMILY))  # the layers here are small
    monkeypatch.setattr(module, "MANY", 0)
    made = []

    class Noted(module.Packed):
        def __init__(self, layers):
            super().__init__(layers)
            made.extend(layers)

    monkeypatch.setattr(module, "Packed", Noted)
    rows = mixed.generate(single, mixed.prompts(FAMILY))
    assert len(made) >= 14 * module.there()  # seven linear layers in each of two blocks
    assert said(rows) == said(plain)
    for row, other in zip(rows, plain, strict=True):
        assert torch.allclose(row.notes["logp"], other.notes["logp"], atol=1e-4)
    assert not any("forward" in vars(layer) for layer in made)
