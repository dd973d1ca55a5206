"""Rows that start from a recorded image or video."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.testing import assert_close

from mmrl.config.registry import Needs
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.diffusion.flow_math import noised
from mmrl.diffusion.model_family import Request
from mmrl.diffusion.steps import Conditioning
from mmrl.papers.dense_dpo import PartialNoise
from mmrl.training.loop import evaluate_references
from tests.diffusion import tiny
from tests.diffusion.flows import asked, denoise, flow, make, picture

MATCHING = {"name": "diffusion.matching", "draws": 2, "time_type": "uniform"}
SHOWN = [Outcome(image=picture(1)), Outcome(image=picture(2))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Find the folder of a tiny pipeline by its name in `tiny.MAKERS`."""

    @cache
    def made(name):
        folder = tmp_path_factory.mktemp(name)
        tiny.MAKERS[name](folder)
        return folder

    return made


@pytest.fixture(scope="module")
def policy(checkpoint):
    return flow(checkpoint("sd3"), MATCHING)


def engine_of(policy, *, eta=0.75, **options) -> PartialNoise:
    wrapped = denoise(policy, **{"num_inference_steps": 6, **options})
    return make("engine", "diffusion.partial_noise", wrapped, eta=eta)


def finished(rows):
    return torch.stack([row.steps.path[-1] for row in rows])


@pytest.mark.parametrize(("eta", "first"), [(1.0, 0), (0.95, 1), (0.75, 2), (0.74, 3), (0.05, 5), (1e-6, 5)])
def test_denoising_starts_at_the_step_of_the_nearest_time(policy, eta, first):
    # 6 steps start at 1, .923, .819, .668, .432 and .009; .7436 is half way between the third and the fourth.
    engine = engine_of(policy, eta=eta)
    before = policy.evaluations
    engine.rollout(asked("a cat", answers=SHOWN))
    assert policy.evaluations - before == 6 - first


def test_on_an_even_schedule_it_is_the_papers_step(policy, monkeypatch):
    # n = round(eta S) steps are left: for S = 20 and eta = .75, 15 of them, so denoising starts at step 5.
    even = torch.linspace(1, 0, 21)
    monkeypatch.setattr(type(policy.family), "sigmas", lambda *given: even)
    for eta, left in ((0.75, 15), (0.5, 10), (0.3, 6), (1.0, 20)):
        engine = engine_of(policy, eta=eta, num_inference_steps=20)
        before = policy.evaluations
        engine.rollout(asked("a cat", answers=SHOWN))
        assert policy.evaluations - before == left == round(eta * 20)


@pytest.mark.parametrize("ode", ["euler", "heun"])
def test_a_row_is_the_noised_answer_denoised(policy, ode):
    engine = engine_of(policy, ode=ode, guidance_scale=2.0)
    prompts = asked("a cat", num=2, answers=SHOWN)
    rows = engine.rollout(prompts)
    clean = policy.encode(prompts[0], SHOWN[0]).steps.path[-1]
    times = engine.engine.times.double()
    condition, negative = (policy.condition(Request("a cat"), negative=it) for it in (False, True))
    asked_of = Conditioning((condition,), torch.tensor([0]), 2.0, 2, (negative,))
    speak = lambda latents, time: policy.velocity(latents, time, asked_of)
    for row, plan in zip(rows, engine.engine.plans(prompts), strict=True):
        latents = noised(clean, plan.start.double(), times[2])[None]
        for i in range(2, 6):
            here, there = times[i : i + 1], times[i + 1 : i + 2]
            with torch.no_grad():
                latents = engine.engine.ode_step(latents, speak(latents, here), here, there, speak)
        assert_close(row.steps.path[-1], latents[0], atol=1e-9, rtol=0)


def test_pure_noise_is_plain_denoising(policy):
    prompts = asked("a cat", num=2, answers=SHOWN)
    engine = engine_of(policy, eta=1.0)
    assert_close(
        finished(engine.rollout(prompts)), finished(engine.engine.rollout(prompts)), atol=1e-12, rtol=0
    )


def test_the_less_noise_the_nearer_the_answer(policy):
    prompts = asked("a cat", num=4, answers=SHOWN)
    clean = policy.encode(prompts[0], SHOWN[0]).steps.path[-1]
    gaps = [
        (finished(engine_of(policy, eta=eta).rollout(prompts)) - clean).square().mean()
        for eta in (0.2, 0.7, 1.0)
    ]
    assert gaps[0] < gaps[1] < gaps[2]


def test_rows_of_a_prompt_share_their_answer_and_differ_in_noise(policy):
    one, other = (asked("a cat", num=3, answers=[shown]) for shown in SHOWN)
    rows = finished(engine_of(policy).rollout(one))
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (rows[i] - rows[j]).abs().max() > 0.01
    # The same noise on another answer makes other rows.
    assert (finished(engine_of(policy).rollout(other)) - rows).abs().flatten(1).max(1).values.min() > 0.01
    # The first recorded answer is taken, whatever stands behind it.
    assert torch.equal(finished(engine_of(policy).rollout(asked("a cat", num=3, answers=SHOWN))), rows)


def test_draws_are_those_of_seed_step_prompt_and_generation(policy):
    prompts = asked("a cat", "a dog", num=2, answers=SHOWN)
    of = lambda stream, order: finished(engine_of(policy, stream=stream).rollout([prompts[i] for i in order]))
    first = of(Stream(1, step=2), [0, 2, 1, 3])
    assert torch.equal(first, of(Stream(1, step=2), [0, 2, 1, 3]))
    assert_close(of(Stream(1, step=2), [2, 0, 3, 1]), first[[1, 0, 3, 2]], atol=1e-12, rtol=0)
    assert not torch.equal(of(Stream(1, step=3), [0, 2, 1, 3]), first)


def test_rows_are_learned_from_by_matching(policy):
    rows = engine_of(policy).rollout(asked("a cat", num=2, answers=SHOWN))
    assert all(row.on_policy and row.length == 2 == row.outcomes[0].end for row in rows)
    batch = policy.collate(rows)
    said = policy(batch, {"error"})
    assert said.logp.shape == (2, 2) and said.logp.requires_grad
    assert_close(batch.steps.clean, finished(rows))


def test_stochastic_steps_after_the_start_are_recorded_in_their_places(checkpoint):
    policy = flow(checkpoint("sd3"))
    wrapped = {"solver": "diffusion.flow_sde", "stochastic": (4, 6), "num_inference_steps": 7}
    engine = engine_of(policy, **wrapped)
    rows = engine.rollout(asked("a cat", num=2, answers=SHOWN))
    assert [row.steps.at.tolist() for row in rows] == [[4, 5]] * 2
    assert all(row.steps.path.shape == (8, 4, 4, 4) for row in rows)
    batch = evaluate_references({"old": policy}, policy.collate(rows), Needs(), 8)
    # The densities that were noted are those of the same steps: the ratio is 1.
    assert_close(batch.others["old"].logp, batch.notes["logp"].double(), atol=1e-5, rtol=0)
    with pytest.raises(
        ValueError, match=r"denoising starts at step 3, but .* begin at 2; set `stochastic: \[3, ...\]`"
    ):
        engine_of(policy, **{**wrapped, "stochastic": (2, 6)}, eta=0.8)


def test_a_video_keeps_its_motion(checkpoint):
    policy = flow(checkpoint("wan"), {**MATCHING, "segments": 2}, max_sequence_length=8)
    engine = engine_of(policy, num_frames=5, eta=0.5, num_inference_steps=4)
    shown = Outcome(video=picture(3, frames=5), times=torch.arange(5) / 16)
    rows = engine.rollout(asked("a cat", num=2, answers=[shown]))
    assert [row.outcomes[0].video.shape for row in rows] == [(5, 3, 32, 32)] * 2
    assert rows[0].length == 4  # two draws of two segments
    assert [row.steps.frames for row in rows] == [(1, 4)] * 2
    assert policy.encode(rows[0].prompt, shown).steps.frames == (1, 4)
    with torch.no_grad():
        assert policy(policy.collate(rows)).logp.isfinite().all()


# ---- what is refused


@pytest.mark.parametrize("eta", [0.0, -0.1, 1.1, float("nan")])
def test_shares_of_noise_that_cannot_be_are_refused(policy, eta):
    with pytest.raises(
        ValueError, match="engine.eta' must be (more than 0 and at most 1|a finite number), not"
    ):
        engine_of(policy, eta=eta)


def test_rows_that_would_all_be_alike_are_refused(policy):
    with pytest.raises(ValueError, match="must not have `same_noise`"):
        engine_of(policy, same_noise=True)


def test_a_prompt_without_an_answer_is_refused(policy):
    with pytest.raises(ValueError, match="prompt 'a cat' has no recorded image or video"):
        engine_of(policy).rollout(asked("a cat"))
    with pytest.raises(ValueError, match="'a cat' holds neither an image nor a video"):
        engine_of(policy).rollout(asked("a cat", answers=[Outcome(text="a cat")]))


def test_an_answer_of_another_size_is_refused(policy):
    big = [Outcome(image=picture(side=64))]
    with pytest.raises(
        ValueError, match=r"'a cat' has latents of \(4, 8, 8\), but the engine makes \(4, 4, 4\)"
    ):
        engine_of(policy).rollout(asked("a cat", answers=big))
