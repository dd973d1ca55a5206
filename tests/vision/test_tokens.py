"""The token policy: what learns, what is saved, how much memory logits take, and in which precision."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from mmrl.config.loading import ConfigError
from mmrl.core import onednn
from mmrl.core.protocols import RendersPrompts
from mmrl.core.rng import seeded
from mmrl.core.types import Outcome
from mmrl.kv_cache.layout import placeholder_ids
from mmrl.runtime.modules import LATER, loading_onto
from mmrl.vision.decoding import step_model
from mmrl.vision.decoding.step_model import chunked_logp
from mmrl.vision.decoding.token_steps import FORBIDDEN
from mmrl.vision.models.loading import load_model
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny

EVERY = pytest.mark.parametrize("family", sorted(tiny.MAKERS))
LEARNING = pytest.mark.parametrize(
    ("family", "options"),
    [("qwen2_5_vl", {}), ("llava", {"lora_rank": 2}), ("qwen2_5_vl", {"freeze_vision_tower": False})],
)


def loaded(checkpoint, family="qwen2_5_vl", **options):
    with seeded(0):  # adapters draw their first weights from the global stream
        return Tokens(model=str(checkpoint(family)), **{"dtype": "float32", **options})


def learning(policy):
    return [name for name, parameter in policy.module.named_parameters() if parameter.requires_grad]


def shaken(policy, seed=0):
    """Move everything that learns a little, so that it matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


def recorded(policy, family):
    return policy.collate(
        [policy.encode(prompt, Outcome(text="0 to 12")) for prompt in mixed.prompts(family)]
    )


def said(policy, family):
    with torch.no_grad():
        return policy(recorded(policy, family)).logp


def test_chunked_logp_of_two_tokens_by_hand():
    # Logits 0, log 3 and forbidden: shares 1/4, 3/4 and 0. Entropy log 4 - 3/4 log 3.
    head = nn.Linear(1, 3, bias=True)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.0, 3.0, 9.0]).log())
        head.bias[0] = 0
    ids, heat = torch.tensor([0, 1]), torch.ones(2)
    out = chunked_logp(torch.zeros(2, 1), head, ids, heat, [2], {"entropy"})
    assert out["logp"].exp().tolist() == pytest.approx([0.25, 0.75])
    assert out["entropy"].tolist() == pytest.approx([torch.tensor(4 / 3**0.75).log().item()] * 2)
    # At temperature 1/2 shares are squared: 1 and 9 of 10.
    out = chunked_logp(torch.zeros(2, 1), head, ids, 0.5 * heat, [2])
    assert out["logp"].exp().tolist() == pytest.approx([0.1, 0.9])
    assert "entropy" not in out
    assert chunked_logp(torch.zeros(1, 1), head, torch.tensor([2]), heat[:1], [2])["logp"] < FORBIDDEN / 2


def test_chunked_logp_gives_the_same_in_chunks_and_never_holds_more_logits_than_it_may(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(8, 50).double()
    ids = torch.randint(0, 40, (23,), generator=generator)
    heat = torch.linspace(0.5, 2, 23, dtype=torch.float64)
    sizes, results = [], []
    head.register_forward_hook(lambda module, inputs, output: sizes.append(output.numel()))
    for limit in (1 << 20, 4 * 50 * 4, 1):
        monkeypatch.setattr(step_model, "LOGIT_BYTES", limit)
        sizes.clear()
        hidden = torch.randn(23, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        hidden.requires_grad_()
        out = chunked_logp(hidden, head, ids, heat, [41, 49], {"entropy"})
        head.zero_grad()
        (out["logp"] * heat + out["entropy"]).sum().backward()
        results.append((out["logp"].detach(), out["entropy"].detach(), hidden.grad, head.weight.grad.clone()))
        # A chunk of one token is the least there is.
        assert max(sizes) * 4 <= max(limit, 4 * 50)
        assert len(sizes) == {1 << 20: 1, 800: 12, 1: 46}[limit]  # twice each, once they are chunks
    for other in results[1:]:
        for value, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)


def test_a_policy_in_small_chunks_says_and_learns_the_same(exact, monkeypatch):
    policy = exact("qwen2_5_vl")
    rows = mixed.answered(policy, "qwen2_5_vl")
    sizes, results = [], []
    hook = policy.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: sizes.append(output.shape[0])
    )
    for limit, largest in ((step_model.LOGIT_BYTES, sum(row.length for row in rows)), (4 * 286 * 5, 5)):
        monkeypatch.setattr(step_model, "LOGIT_BYTES", limit)
        sizes.clear()
        value = mixed.loss(policy, policy.collate(rows))
        value.backward()
        results.append((value.detach(), mixed.gradients(policy)))
        assert max(sizes) == largest
    hook.remove()
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-9)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-9, atol=1e-9)


def test_collate_notes_what_the_engine_took_down_and_nothing_for_recorded_answers(exact):
    policy = exact("qwen2_5_vl")
    prompt = mixed.prompts("qwen2_5_vl")[0]
    (row,) = mixed.generate(policy, [prompt], max_completion_length=3)
    demo = policy.encode(prompt, Outcome(text="0123456", tags={"role": "x"}, recorded={"clip": 1.0}))
    batch = policy.collate((row, demo))
    assert set(batch.notes) == {"logp", "entropy"}
    assert torch.equal(batch.notes["logp"][0, : row.length], row.notes["logp"])
    assert batch.notes["logp"][0, row.length :].isnan().all()
    assert batch.notes["logp"][1].isnan().all()
    assert batch.mask.sum(1).tolist() == [row.length, demo.length]
    assert len(batch.steps.prompts) == 1


def test_a_row_is_made_again_from_its_notes(exact):
    policy = exact("qwen2_5_vl")
    prompt = mixed.prompts("qwen2_5_vl")[0]
    (row,) = mixed.generate(policy, [prompt], max_completion_length=5, temperature=0.7)
    again = policy.restore_rows(prompt, {name: note.double() for name, note in row.notes.items()})
    assert again.outcomes[-1].text == row.outcomes[-1].text and not again.on_policy
    assert again.steps.temperature == pytest.approx(row.steps.temperature) == pytest.approx(0.7)
    assert torch.equal(again.steps.ids, row.steps.ids)
    batches = policy.collate((row,)), policy.collate((again,))
    assert torch.equal(policy(batches[0]).logp, policy(batches[1]).logp)
    assert torch.equal(batches[0].notes["logp"], batches[1].notes["logp"])


def test_encode_keeps_what_an_outcome_says_and_ends_it(exact):
    policy = exact("qwen2_5_vl")
    prompt = mixed.prompts("qwen2_5_vl")[1]
    row = policy.encode(prompt, Outcome(text="0 to 12", tags={"role": "x"}, recorded={"clip": 1.0}))
    assert not row.on_policy
    assert row.steps.ids[-1] == policy.prompt_encoder.end[0]
    assert policy.prompt_encoder.text(row.steps.ids) == "0 to 12"
    (outcome,) = row.outcomes
    assert (outcome.text, outcome.end, outcome.recorded) == ("0 to 12", row.length, {"clip": 1.0})
    assert outcome.tags == {"finish": "stop", "role": "x"}
    assert policy.encode(prompt, Outcome(text="")).steps.ids.tolist() == [policy.prompt_encoder.end[0]]


@EVERY
def test_a_prompt_is_rendered_as_the_model_reads_it(exact, family):
    policy = exact(family)
    for prompt in mixed.prompts(family):
        ids = policy.prompt_encoder.encode(prompt).ids
        text = policy.render(prompt)
        counts = [int(count) for count in re.findall(r"<(?:image|video): (\d+) tokens>", text)]
        media = torch.tensor(placeholder_ids(policy.core.config))
        assert sum(counts) == int(torch.isin(ids, media).sum())
        assert prompt.messages[-1].parts[-1].text in text
        assert text.endswith(policy.prompt_encoder.tokenizer.decode(ids[-3:]))
    assert isinstance(policy, RendersPrompts)


def test_a_recorded_answer_with_a_placeholder_is_refused(exact):
    policy = exact("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"holds the media placeholder '<\|image_pad\|>'"):
        policy.encode(mixed.prompts("qwen2_5_vl")[0], Outcome(text="see <|image_pad|>"))


@EVERY
def test_an_adapter_trains_the_linear_layers_of_the_language_model_alone(exact, checkpoint, family):
    plain, policy = exact(family), loaded(checkpoint, family, lora_rank=2)
    decoder = plain.model.get_decoder()
    linear = [name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)]
    names = learning(policy)
    assert len(names) == 2 * len(linear) > 0
    assert all(".lora_" in name for name in names)
    inside = {id(p) for p in policy.model.get_decoder().parameters()}
    assert all(id(p) in inside for name, p in policy.module.named_parameters() if name in names)


def test_an_adapter_is_on_the_layers_that_are_named(checkpoint):
    policy = loaded(checkpoint, lora_rank=2, lora_target_modules=("q_proj", "mlp.up_proj"))
    adapted = {name for name, module in policy.model.named_modules() if hasattr(module, "lora_A")}
    layers = policy.model.config.get_text_config().num_hidden_layers
    assert len(adapted) == 2 * layers and all(name.endswith(("q_proj", "mlp.up_proj")) for name in adapted)
    with pytest.raises(ConfigError, match=r"names 'qkv', but no linear layer that learns ends so; .*q_proj"):
        loaded(
            checkpoint, lora_rank=2, lora_target_modules=("q_proj", "qkv")
        )  # of the tower, which is frozen


@EVERY
def test_an_adapter_with_the_tower_trains_every_linear_layer_but_the_head(exact, checkpoint, family):
    plain = exact(family)
    policy = loaded(checkpoint, family, lora_rank=2, freeze_vision_tower=False)
    linear = {name for name, module in plain.model.named_modules() if isinstance(module, nn.Linear)}
    head = next(n for n, m in plain.model.named_modules() if m is plain.model.get_output_embeddings())
    adapted = {name for name, module in policy.model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == linear - {head}
    assert all(".lora_" in name for name in learning(policy))
    assert len(learning(policy)) == 2 * len(adapted)


@EVERY
def test_without_an_adapter_the_language_model_learns_and_the_tower_when_asked(exact, checkpoint, family):
    policy = exact(family)
    language = {id(p) for p in policy.model.get_decoder().parameters()}
    language |= {id(p) for p in policy.model.get_output_embeddings().parameters()}
    assert {id(p) for p in policy.module.parameters() if p.requires_grad} == language
    everything = loaded(checkpoint, family, freeze_vision_tower=False)
    assert all(p.requires_grad for p in everything.module.parameters())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_rank": 4}, "was trained with r 2, not 4"),
        ({"lora_rank": 2, "freeze_vision_tower": False}, "on one side only"),
        ({"lora_rank": 2, "lora_alpha": 16.0}, "was trained with lora_alpha 4.0, not 16.0"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(checkpoint, tmp_path, options, said):
    loaded(checkpoint, lora_rank=2).save(tmp_path)
    with pytest.raises(ValueError, match=re.escape(said)):
        loaded(checkpoint, **options).load(tmp_path)


@pytest.mark.parametrize(("family", "tower"), [("qwen2_5_vl", False), ("llava", True)])
def test_a_saved_adapter_is_read_by_peft_and_by_the_policy_bit_for_bit(checkpoint, tmp_path, family, tower):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor

    options = {"lora_rank": 2, "freeze_vision_tower": not tower}
    policy = shaken(loaded(checkpoint, family, **options))
    wanted = said(policy, family)
    policy.save(tmp_path)
    assert not torch.equal(wanted, said(loaded(checkpoint, family, **options), family))

    resumed = shaken(loaded(checkpoint, family, **options), seed=1)
    resumed.load(tmp_path)
    assert torch.equal(said(resumed, family), wanted)

    continued = loaded(checkpoint, family, adapter=str(tmp_path))
    assert torch.equal(said(continued, family), wanted)
    assert len(learning(continued)) == len(learning(policy))

    base = AutoModelForImageTextToText.from_pretrained(checkpoint(family), dtype=torch.float32)
    foreign = PeftModel.from_pretrained(base, str(tmp_path)).state_dict()
    for name, value in policy.adapter.state_dict().items():
        assert torch.equal(foreign[name], value), name
    AutoProcessor.from_pretrained(tmp_path)


@pytest.mark.parametrize(("dtype", "tower"), [("float32", True), ("bfloat16", False)])
def test_a_saved_model_is_read_by_transformers_and_by_the_policy_bit_for_bit(
    checkpoint, tmp_path, dtype, tower
):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    options = {"dtype": dtype, "freeze_vision_tower": not tower}
    policy = shaken(loaded(checkpoint, **options))
    policy.save(tmp_path)
    resumed = shaken(loaded(checkpoint, **options), seed=1)
    resumed.load(tmp_path)
    for name, value in policy.module.state_dict().items():
        found = resumed.module.state_dict()[name]
        assert found.dtype == value.dtype and torch.equal(found, value), name

    foreign = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, value in policy.model.state_dict().items():
        assert torch.equal(foreign[name], value.float()), name
    AutoProcessor.from_pretrained(tmp_path)
    again = Tokens(model=str(tmp_path), dtype="float32")
    assert said(again, "qwen2_5_vl").isfinite().all()


@LEARNING
def test_recomputing_layers_gives_the_same_gradients(exact, checkpoint, family, options):
    results = []
    for again in (False, True):
        policy = shaken(loaded(checkpoint, family, dtype="float64", gradient_checkpointing=again, **options))
        rows = [policy.encode(prompt, Outcome(text="0 to 12")) for prompt in mixed.prompts(family)]
        mixed.loss(policy, policy.collate(rows)).backward()
        results.append(mixed.gradients(policy))
    plain, recomputed = results
    assert plain.keys() == recomputed.keys()
    for name, value in plain.items():
        torch.testing.assert_close(recomputed[name], value, rtol=1e-5, atol=1e-5)


def test_layers_are_in_fact_recomputed(checkpoint):
    counts = []
    for again in (False, True):
        policy = loaded(checkpoint, gradient_checkpointing=again)
        seen = []
        layer = policy.model.get_decoder().layers[0].mlp
        layer.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(1))
        policy(recorded(policy, "qwen2_5_vl")).logp.sum().backward()
        counts.append(len(seen))
    # With a cache prompts and answers pass once each; packed ones pass once, and once again backwards.
    assert counts == [2, 2]
    assert not any(module.training for module in loaded(checkpoint).model.modules())


@LEARNING
def test_gradients_through_onednn_are_the_same(checkpoint, monkeypatch, family, options):
    results = []
    calls = []
    backward = onednn._Linear.backward
    monkeypatch.setattr(
        onednn._Linear, "backward", staticmethod(lambda *args: calls.append(1) or backward(*args))
    )
    for least in (onednn.MANY, 0):  # the layers here are small
        monkeypatch.setattr(onednn, "MANY", least)
        policy = shaken(loaded(checkpoint, family, **options))
        mixed.loss(policy, recorded(policy, family)).backward()
        results.append(mixed.gradients(policy))
    assert bool(calls) == onednn.there()
    plain, other = results
    assert plain.keys() == other.keys()
    for name, value in plain.items():
        torch.testing.assert_close(
            other[name], value, rtol=1e-4, atol=1e-5 * max(1.0, float(value.abs().max()))
        )


@EVERY
def test_bfloat16_is_near_float32(checkpoint, exact, family):
    # SmolVLM casts features to the type of its first weight, so its frozen tower wants frozen embeddings.
    options = {"lora_rank": 2} if family == "smolvlm" else {}
    low = said(loaded(checkpoint, family, dtype="bfloat16", **options), family)
    high = said(exact(family), family)
    assert low.dtype == torch.float32
    inside = high != 0
    assert (low[inside] - high[inside]).abs().mean() < 0.1


def test_trained_weights_are_held_in_float32_and_frozen_ones_as_they_were_loaded(checkpoint):
    for options in ({}, {"lora_rank": 2}):
        policy = loaded(checkpoint, dtype="bfloat16", **options)
        kinds = {(p.requires_grad, p.dtype) for p in policy.module.parameters()}
        assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
        policy(recorded(policy, "qwen2_5_vl")).logp.sum().backward()
        assert all(gradient.dtype == torch.float32 for gradient in mixed.gradients(policy).values())


def test_weights_that_will_be_sharded_become_float32_afterwards(checkpoint):
    with loading_onto(None, shards=True):
        policy = loaded(checkpoint, dtype="bfloat16")
        adapted = loaded(checkpoint, dtype="bfloat16", lora_rank=2)
    assert {p.dtype for p in policy.module.parameters()} == {torch.bfloat16}
    assert all((LATER in vars(p)) is p.requires_grad for p in policy.module.parameters())
    assert {p.dtype for p in adapted.module.parameters() if p.requires_grad} == {torch.float32}


def test_a_policy_that_only_answers_stays_in_its_dtype_and_takes_trained_weights_as_they_are(
    checkpoint, tmp_path
):
    trained = shaken(loaded(checkpoint, dtype="bfloat16"))
    trained.save(tmp_path)
    with loading_onto(None, learns=False):
        policy = loaded(checkpoint, dtype="bfloat16")
    assert {p.dtype for p in policy.module.parameters()} == {torch.bfloat16}
    assert sum(p.nbytes for p in policy.module.parameters()) < sum(
        p.nbytes for p in trained.module.parameters()
    )
    assert said(policy, "qwen2_5_vl").isfinite().all()
    policy.load(tmp_path)  # its trained weights are float32, and rounding would change what it answers
    theirs = dict(trained.module.named_parameters())
    for name, parameter in policy.module.named_parameters():
        assert parameter.dtype == theirs[name].dtype and torch.equal(parameter, theirs[name]), name
    assert torch.equal(said(policy, "qwen2_5_vl"), said(trained, "qwen2_5_vl"))


def test_models_are_loaded_straight_onto_a_device(checkpoint):
    with loading_onto(torch.device("meta")):
        model = load_model(str(checkpoint("qwen2_5_vl")), dtype="bfloat16", attn_implementation="sdpa")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with loading_onto(torch.device("cpu")):
        model = load_model(str(checkpoint("qwen2_5_vl")), dtype="float32", attn_implementation="sdpa")
    other = load_model(str(checkpoint("qwen2_5_vl")), dtype="float32", attn_implementation="sdpa")
    assert not any(module._forward_pre_hooks for module in model.modules())  # accelerate's would move inputs
    for name, weight in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


def test_pixel_limits_bound_images_one_at_a_time(checkpoint):
    prompt = tiny.ask("p", tiny.picture(height=112, width=112), "what")

    def patches(**limits):
        return len(loaded(checkpoint, **limits).prompt_encoder.encode(prompt).media["pixel_values"])

    # 112 x 112 pixels are 64 patches of 14 x 14; this checkpoint bounds images at 56 x 56, which are 16.
    assert patches() == 16
    assert patches(max_pixels=112 * 112) == 64
    assert patches(max_pixels=28 * 28) == 4
    assert patches(min_pixels=168 * 168, max_pixels=168 * 168) == 144


@pytest.mark.parametrize("family", ["llava", "llava_onevision", "smolvlm", "internvl"])
def test_pixel_limits_that_a_model_cannot_keep_are_refused(checkpoint, family):
    with pytest.raises(ValueError, match=r"`min_pixels` and `max_pixels` do not fit this model"):
        loaded(checkpoint, family, max_pixels=28 * 28)


def test_transforms_change_the_model_in_order(checkpoint):
    seen = []

    def note(name):
        return lambda model: (seen.append(name), model)[1]

    loaded(checkpoint, transform=(note("first"), note("second")))
    assert seen == ["first", "second"]


def test_what_cannot_be_loaded_is_an_error_that_names_it(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="cannot load the processor of '.*nowhere'"):
        Tokens(model=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="cannot load the adapter '.*nowhere'"):
        loaded(checkpoint, adapter=str(tmp_path / "nowhere"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="it holds an adapter: name it as `policy.adapter`"):
        Tokens(model=str(tmp_path / "adapter"))


def test_weights_are_read_from_safetensors_only(checkpoint, tmp_path):
    policy = loaded(checkpoint)
    policy.save(tmp_path)
    state = policy.model.state_dict()
    (Path(tmp_path) / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2_5_vl"
    with pytest.raises(ValueError, match="cannot load the model"):
        Tokens(model=str(tmp_path))
