"""Rollouts on a cheaper model than the one that learns, on the same weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from mmrl.build import build
from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.compression.transforms.bnb_quantize import bnb_quantize
from mmrl.compression.transforms.structured_pruning import structured_pruning
from mmrl.compression.transforms.visual_computation import (
    drop_visual_heads,
    drop_visual_layers,
    sparse_visual_ffn,
    yopo25,
)
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.training.loop import train
from mmrl.vision.engines.contrastive_decoding import ContrastiveDecoding
from mmrl.vision.engines.derived_answers import DropoutNtp
from mmrl.vision.engines.generate import Generate
from mmrl.vision.policies.tokens import Tokens
from tests.support.toys import plan
from tests.vision import mixed, tiny

FAMILY = "qwen2_5_vl"
ZERO = (partial(drop_visual_heads, keep=1.0), partial(sparse_visual_ffn, keep=1.0))


def engine(policy, *transform, seed=0, purpose="train", **options):
    stream = Stream(seed, purpose=purpose)
    return Generate(policy, stream=stream, transform=transform, max_completion_length=6, **options)


def asked(times=2):
    return [prompt for prompt in mixed.prompts(FAMILY)[:3] for _ in range(times)]


def said(rows):
    return [(row.steps.ids.tolist(), row.notes["logp"].tolist()) for row in rows]


def loaded(checkpoint, dtype="float32", **options):
    return Tokens(model=str(checkpoint(FAMILY)), dtype=dtype, **options)


@pytest.mark.parametrize("family", [FAMILY, "llava"])
@pytest.mark.parametrize("share", [True, False])
def test_a_transform_of_no_strength_changes_no_answer(exact, family, share):
    policy = exact(family, share_prefix=share)
    prompts = mixed.prompts(family)[1:3] * 2
    after = policy.model.config.get_text_config().num_hidden_layers
    rows = engine(policy, *ZERO, partial(drop_visual_layers, after=after)).rollout(prompts)
    expected = engine(policy).rollout(prompts)
    for one, two in zip(rows, expected, strict=True):
        assert one.steps.ids.tolist() == two.steps.ids.tolist()
        assert (one.notes["logp"] - two.notes["logp"]).abs().max() < 1e-6  # notes are float32


def test_only_the_engine_is_cheap_and_it_holds_the_policys_own_weights(exact):
    policy = exact(FAMILY)
    before = said(engine(policy).rollout(asked()))
    batch = policy.collate(engine(policy).rollout(asked()))
    logp = policy(batch).logp.detach()
    cheap = engine(policy, yopo25)
    assert said(cheap.rollout(asked())) != before
    assert torch.equal(policy(batch).logp, logp)
    mine = {id(p) for p in policy.model.parameters()}
    assert {id(p) for p in cheap.rollout_policy.model.parameters()} == mine
    with cheap.exactly():
        assert said(cheap.rollout(asked())) == before
    assert said(cheap.rollout(asked())) != before


TRANSFORMS = {
    "drop_visual_layers": partial(drop_visual_layers, after=1),
    "yopo25": yopo25,
    "structured_pruning": partial(structured_pruning, ffn_units=0.5),
    "bnb_quantize": partial(bnb_quantize, nbits=8),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_rollouts_follow_the_weights_after_an_update(checkpoint, name):
    policy = loaded(checkpoint)
    cheap = engine(policy, TRANSFORMS[name])
    before = said(cheap.rollout(asked()))
    optimizer = torch.optim.SGD([p for p in policy.module.parameters() if p.requires_grad], lr=0.3)
    mixed.loss(policy, policy.collate(engine(policy).rollout(asked()))).backward()
    optimizer.step()
    after = said(cheap.rollout(asked()))
    assert after == said(engine(policy, TRANSFORMS[name]).rollout(asked()))
    assert after != before


@pytest.mark.parametrize("name", ["yopo25", "bnb_quantize"])
def test_rollouts_follow_an_adapter_whose_base_is_transformed_once(checkpoint, name):
    policy = loaded(checkpoint, lora_rank=2)
    calls = []

    def counted(model):
        calls.append(1)
        return TRANSFORMS[name](model)

    cheap = engine(policy, counted)
    before = said(cheap.rollout(asked()))
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    after = said(cheap.rollout(asked()))
    assert after != before and after == said(engine(policy, TRANSFORMS[name]).rollout(asked()))
    assert len(calls) == 1


def test_gradients_do_not_know_how_rollouts_were_made(checkpoint):
    policy = loaded(checkpoint, "float64", lora_rank=2)
    rows = engine(policy).rollout(asked())
    mixed.loss(policy, policy.collate(rows)).backward()
    expected = mixed.gradients(policy)
    engine(policy, yopo25, cache=partial(visual_quant, nbits=1)).rollout(asked())
    mixed.loss(policy, policy.collate(rows)).backward()
    found = mixed.gradients(policy)
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_layers_that_are_computed_anew_in_learning_do_not_disturb_rollouts(checkpoint):
    plain, again = (loaded(checkpoint, "float64", gradient_checkpointing=on) for on in (False, True))
    rows = [engine(policy, yopo25).rollout(asked()) for policy in (plain, again)]
    assert said(rows[0]) == said(rows[1])
    assert any(module.training for module in again.model.modules())


def test_a_policy_that_is_pruned_itself_is_pruned_further(checkpoint):
    policy = loaded(checkpoint, "float64", transform=(partial(sparse_visual_ffn, keep=0.5),))
    cheap = engine(policy, partial(drop_visual_layers, after=1))
    both = loaded(
        checkpoint,
        "float64",
        transform=(partial(sparse_visual_ffn, keep=0.5), TRANSFORMS["drop_visual_layers"]),
    )
    assert said(cheap.rollout(asked())) == said(engine(both).rollout(asked()))
    assert said(cheap.rollout(asked())) != said(engine(policy).rollout(asked()))


@pytest.mark.parametrize("name", ["drop_visual_layers", "yopo25"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_cache_goes_with_a_transform(exact, name, fused):
    policy = exact(FAMILY)
    whole = partial(visual_quant, nbits=16, fused=fused)  # which loses nothing
    rows = engine(policy, TRANSFORMS[name], cache=whole).rollout(asked(3))
    expected = engine(policy, TRANSFORMS[name]).rollout(asked(3))
    for one, two in zip(rows, expected, strict=True):
        assert one.steps.ids.tolist() == two.steps.ids.tolist()
        assert (one.notes["logp"] - two.notes["logp"]).abs().max() < 1e-6
    few = engine(policy, TRANSFORMS[name], cache=partial(visual_quant, nbits=1, fused=fused))
    assert said(few.rollout(asked(3))) != said(rows)


def test_wrappers_that_read_twice_read_the_cheaper_model(exact):
    policy = exact("llava")
    prompts = [tiny.ask("one", tiny.picture(), "what"), tiny.ask("two", "look", tiny.picture(seed=3))] * 2
    cheap = engine(policy, yopo25)
    dial = ContrastiveDecoding(cheap, stream=Stream(0), contrast_alpha=(0.0,), contrast_alpha_std=(0.0,))
    for row, wanted in zip(dial.rollout(prompts), cheap.rollout(prompts), strict=True):
        assert row.steps.ids.tolist() == wanted.steps.ids.tolist()
        # A softmax of a softmax differs in the last bit.
        torch.testing.assert_close(row.notes["logp"], wanted.notes["logp"], rtol=0, atol=1e-6)
    # The second half of a prompt's answers begins as one of the cheaper model's.
    first, tail = DropoutNtp(cheap, share=0.5).rollout(prompts[::2])
    assert said([first]) == said(cheap.rollout(prompts[:1]))
    given = int(0.5 * len(first.steps.ids))
    assert tail.steps.ids[:given].tolist() == first.steps.ids[:given].tolist()


@pytest.fixture
def alone():
    """Be the only process of a group."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def test_a_policy_that_is_wrapped_for_data_parallelism_is_followed(checkpoint, alone):
    policy = loaded(checkpoint)
    policy.module = nn.parallel.DistributedDataParallel(policy.module)
    cheap = engine(policy, TRANSFORMS["bnb_quantize"])
    before = said(cheap.rollout(asked()))
    optimizer = torch.optim.SGD([p for p in policy.module.parameters() if p.requires_grad], lr=0.3)
    mixed.loss(policy, policy.collate(engine(policy).rollout(asked()))).backward()
    optimizer.step()
    after = said(cheap.rollout(asked()))
    assert after != before and after == said(engine(policy, TRANSFORMS["bnb_quantize"]).rollout(asked()))


def test_load_engine_gives_the_cache_and_the_transforms_of_a_config(checkpoint, tmp_path, exact):
    from mmrl import load_engine

    path = tmp_path / "run.yaml"
    path.write_text(
        f"policy: {{name: vision.tokens, model: {checkpoint(FAMILY)}, dtype: float64}}\n"
        "evaluation:\n"
        "  engine:\n"
        "    - name: vision.generate\n"
        "      max_completion_length: 6\n"
        "      transform: [{name: compression.drop_visual_layers, after: 1}]\n"
        "      cache: {name: compression.visual_quant, nbits: 8}\n"
        "    - {name: compression.fidelity_gate, allow: true, num_tokens: 2}\n"
    )
    found = load_engine(path).rollout(asked())
    options = {"cache": partial(visual_quant, nbits=8), "purpose": "inference"}
    cheap = engine(exact(FAMILY), TRANSFORMS["drop_visual_layers"], **options)
    assert said(found) == said(cheap.rollout(asked()))


def questions(*, num: int = 4):
    """Ask about images."""
    return [tiny.ask(f"p{i}", tiny.picture(seed=i), "which fox") for i in range(num)]


def test_a_run_learns_from_cheap_rollouts_and_reports_the_gap_and_the_seconds(checkpoint, tmp_path, capsys):
    generate = {"name": "vision.generate", "max_completion_length": 6}
    generate["cache"] = {"name": "compression.visual_quant", "nbits": 1}
    generate["transform"] = [{"name": "compression.drop_visual_layers", "after": 1}]
    policy = {"name": "vision.tokens", "model": str(checkpoint("llava")), "dtype": "float32"}
    raw = plan(
        tmp_path / "run",
        policy=policy,
        data=f"{__name__}:questions",
        rollout={"engine": [generate, {"name": "compression.speedup_probe", "at": 1}]},
        rewards=["tests.support.toys:brevity"],
        objective={"step_weight": ["truncated_importance"]},
        learn={"learning_rate": 1e-3},
        max_steps=2,
    )
    run = build(parse(raw, Config))
    train(run)
    first, second = run.journal.read()
    assert first["sampling/kl"] > 1e-4 and first["sampling/sampling_logp_difference/mean"] > 1e-3
    assert 0 < first["sampling/ess/rows"] < 1
    assert "rollout/seconds" not in first
    told = ("seconds", "exact_seconds", "speedup", "agreement")
    assert {f"rollout/{name}" for name in told} <= set(second)
    said = capsys.readouterr().out
    cheap = "transform compression.drop_visual_layers, cache compression.visual_quant"
    assert f"rollouts on {cheap}: log-probabilities differ by" in said
    assert "warning" not in said.replace("UserWarning", "")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Engine and policy" in page and "seconds on the exact engine" in page
