"""Prompts of several sizes: nothing depends on which of them are sampled or learned together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from mmrl.config.registry import Needs
from mmrl.core.ragged import Ragged
from mmrl.core.types import Outcome, PromptError, Size, Unit
from mmrl.diffusion.engines.with_prefix_rollouts import WithPrefixRollouts
from mmrl.diffusion.steps import SizedSteps
from mmrl.training.loop import evaluate_references
from tests.diffusion.families.common import pictures, prompt_of
from tests.diffusion.flows import Known, Request, asked, denoise, flow, make, picture

TRANSITION = "diffusion.transition"
MATCHING = {"name": "diffusion.matching", "draws": 2, "time_type": "discrete_wo_init"}
# Tiny pipeline, length of texts, size of the source image, and sizes (frames, height, width) to ask for. The
# times of the first two depend on the size.
CASES = {
    "flux": (8, (), ((1, 32, 32), (1, 64, 32), (1, 32, 48))),
    "flux2_klein": (256, ((64, 80),), ((1, 64, 64), (1, 96, 64))),
    "wan": (8, (), ((5, 32, 32), (9, 32, 48), (1, 48, 32))),
}


def engine_of(policy, size, **options):
    frames, height, width = size
    sides = {"num_frames": frames, "height": height, "width": width}
    return denoise(policy, **sides, **{"num_inference_steps": 4, "guidance_scale": 2.0, **options})


def policy_of(checkpoint, name, likelihood=TRANSITION, **options):
    return flow(checkpoint(name), likelihood, max_sequence_length=CASES[name][0], **options)


def mixed(name, num=2):
    """Make prompts of every size, the first one of which is left to the engine, in turn."""
    _, images, sizes = CASES[name]
    prompts = [prompt_of(Request(f"p{i}", pictures(images, seed=i))) for i in range(len(sizes))]
    sized = [
        replace(prompt, size=Size(*size) if i else None)
        for i, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
    ]
    return sized * num


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_prompt_of_its_own_size_is_sampled_as_by_an_engine_of_that_size(checkpoint, name):
    policy, sizes = policy_of(checkpoint, name), CASES[name][2]
    calls = []
    velocity = policy.module.forward
    policy.module.forward = lambda latents, *given: calls.append(latents.shape) or velocity(latents, *given)
    options = {"solver": "diffusion.flow_sde"}
    rows = engine_of(policy, sizes[0], **options).rollout(mixed(name))
    assert len(calls) == 4 * len(sizes), "one call for every step and size"
    for i, size in enumerate(sizes):
        engine = engine_of(policy, size, **options)
        alone = engine.rollout([replace(prompt, size=None) for prompt in mixed(name)[i :: len(sizes)]])
        for row, wanted in zip(rows[i :: len(sizes)], alone, strict=True):
            assert row.steps.path.shape[1:] == engine.shape and torch.equal(row.steps.times, engine.times)
            assert_close(row.steps.path, wanted.steps.path, atol=1e-9, rtol=0)
            assert_close(row.notes["logp"], wanted.notes["logp"], atol=1e-6, rtol=0)
            shown, other = row.outcomes[-1], wanted.outcomes[-1]
            shown, other = (one.image if one.video is None else one.video for one in (shown, other))
            assert shown.shape[-2:] == size[1:] and (shown.int() - other.int()).abs().max() <= 1
            assert row.steps.frames == wanted.steps.frames
    schedules = {tuple(row.steps.times.tolist()) for row in rows}
    assert len(schedules) == (1 if name == "wan" else len(sizes)), "the shift is that of the row's size"


@pytest.mark.parametrize(
    ("name", "likelihood"),
    [("flux", MATCHING), ("flux", TRANSITION), ("flux2_klein", MATCHING), ("wan", TRANSITION)],
    ids=lambda given: given if isinstance(given, str) else "matching",
)
def test_gradients_of_a_mixed_batch_are_the_sums_of_those_of_every_size(checkpoint, name, likelihood):
    policy = policy_of(checkpoint, name, likelihood, lora_rank=2)
    solver = {} if likelihood is MATCHING else {"solver": "diffusion.flow_sde"}
    rows = engine_of(policy, CASES[name][2][0], **solver).rollout(mixed(name))
    weight = torch.linspace(-1, 1, len(rows), dtype=torch.float64)[:, None]
    learning = [p for p in policy.module.parameters() if p.requires_grad]
    gradient = lambda loss: torch.autograd.grad(loss, learning)
    number = len(CASES[name][2])
    # Wan embeds times and modulates layers in float32.
    close = {"atol": 1e-7, "rtol": 1e-5} if name == "wan" else {"atol": 1e-9, "rtol": 1e-7}
    whole = policy.collate(rows)
    assert isinstance(whole.steps, SizedSteps) and len(whole.steps.parts) == number
    together = policy(whole).logp
    alone = [policy(policy.collate(rows[i::number])).logp for i in range(number)]
    for i, logp in enumerate(alone):
        assert_close(together[i::number], logp, atol=1e-9, rtol=0)
    wanted = [
        sum(grads) for grads in zip(
            *(gradient((logp * weight[i::number]).sum()) for i, logp in enumerate(alone)), strict=True
        )
    ]  # fmt: skip
    assert_close(list(gradient((together * weight).sum())), wanted, **close)
    for unit in (Unit.STEP, Unit.ROW):
        found = [torch.zeros_like(value) for value in wanted]
        for places, columns in whole.cuts(4, unit):
            part = whole.select(places, columns)
            assert not isinstance(part.steps, SizedSteps), "micro-batches hold one size"
            loss = (policy(part).logp * weight[places]).sum()
            found = [value + more for value, more in zip(found, gradient(loss), strict=True)]
        assert_close(found, wanted, **close)


def test_micro_batches_of_large_images_come_first(checkpoint):
    policy = policy_of(checkpoint, "flux", MATCHING)
    batch = policy.collate(engine_of(policy, (1, 32, 32), guidance_scale=1.0).rollout(mixed("flux")))
    sides = [part.steps.clean.shape[-2:] for part in batch.split(1000, Unit.ROW)]
    assert sides == [(8, 4), (4, 6), (4, 4)]
    batch = batch.replace(group=torch.tensor([0, 1, 2, 2, 1, 0]))
    kinds = [isinstance(part.steps, SizedSteps) for part in batch.split(1000, Unit.GROUP)]
    assert kinds == [False, True], "the unit keeps groups of several sizes together"
    (_, several) = batch.split(1000, Unit.GROUP)
    assert several.steps.cost(torch.arange(4)) == 4 * 2 and len(
        several.steps[torch.tensor([3]), slice(1)].clean
    )
    with pytest.raises(ValueError, match="rows of several sizes .* reads their `velocity`"):
        policy(several, frozenset({"velocity"}))
    assert policy(several, frozenset({"error"})).extra["error"].shape == (4, 2)


def test_latents_of_other_policies_are_kept_for_every_size(checkpoint):
    policy = policy_of(checkpoint, "flux", MATCHING)
    rows = engine_of(policy, (1, 32, 32), guidance_scale=1.0).rollout(mixed("flux"))
    batch, needs = policy.collate(rows), Needs(others={"old": frozenset({"velocity"})})
    kept = evaluate_references({"old": policy}, batch, needs, 3)
    assert isinstance(kept.others["old"].extra["velocity"], Ragged)
    halves = kept.select(torch.tensor([5, 0, 3, 1]))
    for part in halves.split(4, Unit.ROW):
        with torch.no_grad():
            wanted = policy(part, frozenset({"velocity"}))
        assert_close(part.others["old"].extra["velocity"], wanted.extra["velocity"], atol=1e-9, rtol=0)
        assert_close(part.others["old"].logp, wanted.logp, atol=1e-9, rtol=0)
    moved = halves.on(torch.device("cpu")).others["old"].extra["velocity"]
    assert isinstance(moved, Ragged) and moved[torch.tensor([0])].shape == (1, 2, 4, 4, 6)


@pytest.mark.parametrize("sides", [(32,), (32, 64)])
def test_a_process_of_shards_makes_as_many_calls_as_the_one_with_most_sizes(checkpoint, monkeypatch, sides):
    policy = flow(checkpoint("sd3"), MATCHING | {"time_type": "uniform"}, lora_rank=2)
    batch = policy.collate(
        tuple(policy.encode(*asked("a cat"), Outcome(image=picture(side=side))) for side in sides)
    )
    learning = [p for p in policy.module.parameters() if p.requires_grad]
    gradient = lambda: torch.autograd.grad(policy(batch).logp.sum(), learning)
    wanted, forward, calls = gradient(), policy.module.forward, []
    monkeypatch.setattr("mmrl.diffusion.policies.flow.meets", lambda module: True)
    monkeypatch.setattr("mmrl.diffusion.policies.flow.most_calls", lambda number, device: 3)
    policy.module.forward = lambda *given: calls.append(1) or forward(*given)
    assert_close(gradient(), wanted, atol=1e-12, rtol=0)
    assert len(calls) == 3


def test_a_recorded_image_of_another_size_changes_no_draw(checkpoint):
    given = {"name": "diffusion.matching", "draws": 2, "time_type": "uniform"}
    policy = flow(checkpoint("sd3"), given)
    prompts = asked("a cat", num=2)
    rows = denoise(policy).rollout(prompts)
    recorded = [policy.encode(prompts[0], Outcome(image=picture(side=side))) for side in (32, 64)]
    same, other = (policy.collate((*rows[:1], one, *rows[1:])) for one in recorded)
    with torch.no_grad():
        assert_close(policy(same).logp[[0, 2]], policy(other).logp[[0, 2]], atol=1e-9, rtol=0)
    assert torch.equal(same.steps.times[1], other.steps.parts[0].times[0]), "drawn by place in the group"


# ---- engines


def known(**options):
    return denoise(Known(), **{"solver": "diffusion.flow_sde", "height": 2, "width": 2, **options})


def sized(*texts, height=4, width=2, num=1):
    return [replace(prompt, size=Size(0, height, width)) for prompt in asked(*texts, num=num)]


@pytest.mark.parametrize("size", [0, 1, 2])
def test_noise_depends_on_the_prompt_and_its_size_alone(size):
    prompts = [*asked("0.2", num=2), *sized("0.7", num=3), *asked("0.5")]
    order = torch.tensor([3, 0, 5, 2, 4, 1])
    engine = known(batch_size=size)
    rows, turned = engine.rollout(prompts), engine.rollout([prompts[i] for i in order])
    assert [row.prompt.uid for row in rows] == [prompt.uid for prompt in prompts]
    assert [row.steps.path.shape[1:] for row in rows] == [(1, 2, 2)] * 2 + [(1, 4, 2)] * 3 + [(1, 2, 2)]
    for row in turned:  # rows of a prompt are numbered in their order
        assert any(torch.equal(row.steps.path, other.steps.path) for other in rows)
    assert engine.policy.largest == (size or 3)


@pytest.mark.parametrize("one_step", [False, True])
def test_prefixes_are_completed_in_their_size(one_step):
    engine = known(num_inference_steps=5)
    prompts = [*asked("0.2"), *sized("0.7"), *asked("0.5")]
    whole = WithPrefixRollouts(engine, one_step=one_step).rollout(prompts)
    for row, prompt in zip(whole, prompts, strict=True):
        (alone,) = WithPrefixRollouts(engine, one_step=one_step).rollout([prompt])
        assert [outcome.end for outcome in row.outcomes] == [outcome.end for outcome in alone.outcomes]
        for outcome, wanted in zip(row.outcomes, alone.outcomes, strict=True):
            assert torch.equal(outcome.image, wanted.image)


def test_partly_noised_answers_may_have_several_sizes(checkpoint):
    policy = flow(checkpoint("sd3"), "diffusion.matching")
    engine = make("engine", "diffusion.partial_noise", denoise(policy), eta=0.5)
    small, large = (asked(f"p{side}", answers=[Outcome(image=picture(side=side))])[0] for side in (32, 64))
    large = replace(large, size=Size(1, 64, 64))
    rows = engine.rollout([small, large])
    assert [row.outcomes[0].image.shape[-1] for row in rows] == [32, 64]
    (alone,) = engine.rollout([large])
    assert_close(rows[1].steps.path, alone.steps.path, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match=r"latents of \(4, 8, 8\), but the engine makes \(4, 4, 4\)"):
        engine.rollout([replace(large, size=None)])


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("sd3", Size(1, 36, 32), "cannot read the prompt 'a cat': .*a multiple of 8 pixels .*, not 36 x 32"),
        ("sd3", Size(5, 32, 32), "`num_frames` must be 1, not 5"),
        ("wan", Size(6, 32, 32), "one more than a multiple of 4, not 6"),
        ("sd3", Size(source=True), "size of its source image, but has no image"),
    ],
)
def test_a_size_that_the_model_cannot_make_names_the_prompt(checkpoint, name, size, message):
    engine = denoise(flow(checkpoint(name), "diffusion.matching", max_sequence_length=8))
    with pytest.raises(PromptError, match=message):
        engine.rollout([replace(*asked("a cat"), size=size)])
