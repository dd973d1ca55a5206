"""The engine: deterministic and stochastic rollouts, what chance depends on, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from mmrl.diffusion.flow_math import clean_estimate, euler_step
from tests.diffusion import tiny
from tests.diffusion.flows import SOLVERS, TEXTS, Known, Normal, asked, denoise, flow, solver

WHOLE = {"solver": "diffusion.flow_sde"}


def known(likelihood="diffusion.matching", **options):
    """Make an engine over the flow of normal data, for images of 4 numbers."""
    return denoise(Known(likelihood=likelihood), **{"height": 2, "width": 2, **options})


def walking(**options):
    """Make one whose steps are stochastic and recorded."""
    return known("diffusion.transition", **{**WHOLE, **options})


def paths(rows):
    return torch.stack([row.steps.path for row in rows])


# ---- deterministic rollouts


def test_every_entry_is_answered_in_order():
    order = asked("0.2", "0.7", "0.2")
    rows = known().rollout(order)
    assert [row.prompt.uid for row in rows] == ["0.2", "0.7", "0.2"]
    for row in rows:
        assert row.group == row.prompt.uid
        assert row.on_policy
        (outcome,) = row.outcomes
        assert outcome.end == row.length == 6  # draws of matching
        assert outcome.image.dtype == torch.uint8 and outcome.image.shape == (3, 2, 2)
        assert row.steps.path.shape == (1, 1, 2, 2), "no path is kept"
        assert not len(row.steps.at) and row.steps.solver is None and not row.notes
    assert not torch.equal(paths(rows)[0], paths(rows)[2])
    assert known().rollout([]) == ()


@pytest.mark.parametrize(("ode", "tolerance"), [("euler", 0.03), ("heun", 0.001)])
def test_deterministic_rollouts_follow_the_flow(ode, tolerance):
    # The flow of normal data takes noise z to mean + std z.
    engine = known(num_inference_steps=100, ode=ode)
    plans = engine.plans(asked("0.2", "0.7"))
    made = paths(engine.rollout(asked("0.2", "0.7")))[:, 0]
    for row, plan, mean in zip(made, plans, (0.2, 0.7), strict=True):
        assert_close(row, mean + 0.3 * plan.start.double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize(("ode", "evaluations"), [("euler", 10), ("heun", 19)])
@pytest.mark.parametrize(("guidance_scale", "passes"), [(1.0, 1), (4.5, 2)])
def test_network_calls_are_counted(ode, evaluations, guidance_scale, passes):
    # Heun asks twice per step but for the last.
    engine = known(num_inference_steps=10, ode=ode, guidance_scale=guidance_scale)
    rows = engine.rollout(asked("0.2", num=3))
    assert engine.policy.evaluations == 3 * evaluations * passes
    assert {(row.steps.guidance, row.steps.passes) for row in rows} == {(guidance_scale, passes)}


def test_guidance_leads_away_from_the_empty_text():
    # Twice as far from the mean 0 of the empty text as .3 is.
    engine = known(num_inference_steps=100, guidance_scale=2.0, ode="heun")
    (plan,) = engine.plans(asked("0.3"))
    made = paths(engine.rollout(asked("0.3")))[0, 0]
    assert_close(made, 0.6 + 0.3 * plan.start.double(), atol=0.005, rtol=0)


@pytest.mark.parametrize("name", ["sd3", "sd3_pixel"])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_rollout_is_what_the_pipeline_makes_of_the_same_noise(checkpoint, name, guidance):
    policy = flow(checkpoint(name), "diffusion.matching", dtype="float32")
    engine = denoise(policy, guidance_scale=guidance, height=32 if name == "sd3" else 8, width=16)
    prompts = asked(*TEXTS)
    rows = engine.rollout(prompts)
    pipe = tiny.load(checkpoint(name))
    latents = torch.stack([plan.start for plan in engine.plans(prompts)])
    theirs = pipe(
        list(TEXTS),
        latents=latents,
        height=8 * engine.shape[1],  # it divides by 8 even without an autoencoder
        width=8 * engine.shape[2],
        num_inference_steps=4,
        guidance_scale=guidance,
        max_sequence_length=1,
        output_type="latent",
        return_dict=False,
    )[0]
    assert_close(paths(rows)[:, 0], theirs, atol=2e-5, rtol=0)
    with torch.no_grad():
        pixels = policy.family.decode(policy.pipe, theirs).clamp(0, 1)
    pictures = torch.stack([row.outcomes[0].image for row in rows])
    assert pictures.float().std() > 5
    assert (pictures.float() / 255 - pixels).abs().max() < 0.6 / 255


# ---- stochastic rollouts


@pytest.mark.parametrize("name", SOLVERS)
def test_a_path_is_made_of_the_solvers_steps_and_their_densities_are_noted(name):
    engine = walking(solver=f"diffusion.{name}", num_inference_steps=5)
    (row,) = engine.rollout(asked("0.5"))
    (plan,) = engine.plans(asked("0.5"))
    times, run, normal = engine.times, solver(name), Normal(0.5)
    assert row.steps.path.shape == (6, 1, 2, 2)
    assert row.steps.at.tolist() == [0, 1, 2, 3] and row.length == 4
    assert torch.equal(row.steps.path[0], plan.start.double())
    for i in range(4):
        here, at = row.steps.path[i][None], (times[i : i + 1], times[i + 1 : i + 2])
        step = run(here, normal.velocity(here, at[0]), *at, times[1])
        assert_close(row.steps.path[i + 1], step.draw(plan.noise[i].double()[None])[0])
        assert_close(
            row.notes["logp"][i].double(), step.logp(row.steps.path[i + 1][None])[0], atol=1e-5, rtol=0
        )
    # The last step follows the flow.
    here, last = row.steps.path[4][None], times[4:5]
    assert_close(row.steps.path[5], euler_step(here, normal.velocity(here, last), last, times[5:6])[0])
    assert row.notes.keys() == {"logp"} and row.outcomes[0].end == 4


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde"])
def test_images_of_many_stochastic_steps_are_distributed_as_the_data(name):
    given = {"name": f"diffusion.{name}", "noise_level": 0.4}
    engine = walking(solver=given, num_inference_steps=150, height=60, width=60)
    made = engine.rollout(asked("0.5"))[0].steps.path
    for i in (30, 75, 110, 150):
        mean, variance = Normal(0.5).moments(engine.times[i])
        error = (variance / 3600).sqrt()
        assert abs(made[i].mean() - mean) < 5 * error
        assert abs(made[i].var() / variance - 1) < 5 * math.sqrt(2 / 3600) + 0.03


def test_noise_near_0_makes_the_deterministic_image():
    still = paths(known().rollout(asked("0.5")))[:, -1]
    for name in SOLVERS:
        engine = walking(solver={"name": f"diffusion.{name}", "noise_level": 1e-6})
        assert_close(paths(engine.rollout(asked("0.5")))[:, -1], still, atol=1e-5, rtol=0)


def test_matching_may_roll_out_stochastically_to_the_very_end():
    engine = known(**WHOLE, stochastic=(0, 4))
    (row,) = engine.rollout(asked("0.5"))
    assert not row.notes, "densities of steps are none of draws"
    assert row.length == 6 and row.steps.path.isfinite().all()


def noisy(engine, i):
    """Tell whether step `i` left the flow."""
    (row,) = engine.rollout(asked("0.5"))
    here, at = row.steps.path[i][None], engine.times[i : i + 1]
    straight = euler_step(here, Normal(0.5).velocity(here, at), at, engine.times[i + 1 : i + 2])[0]
    return (row.steps.path[i + 1] - straight).abs().max() > 1e-6


def test_only_the_window_is_stochastic_and_recorded():
    engine = walking(num_inference_steps=6, stochastic=(1, 4))
    assert [bool(noisy(engine, i)) for i in range(6)] == [False, True, True, True, False, False]
    (row,) = engine.rollout(asked("0.5"))
    assert row.steps.at.tolist() == [1, 2, 3] and len(row.notes["logp"]) == 3 == row.length


def test_a_window_moves_from_collection_to_collection():
    stream = Stream()
    engine = walking(stream=stream, num_inference_steps=6, stochastic=(1, 5), window_size=2)
    starts = []
    for step in range(60):
        stream.step = step
        low, high = engine.window()
        assert (low, high) == engine.window(), "it is drawn once for a collection"
        assert high - low == 2
        rows = engine.rollout(asked("0.2", "0.7"))
        assert {tuple(row.steps.at.tolist()) for row in rows} == {(low, low + 1)}
        starts.append(low)
    assert set(starts) == {1, 2, 3}, "uniform over [lo, hi - size]"
    assert [noisy(engine, i).item() for i in range(6)] == [low <= i < high for i in range(6)]


def test_the_start_of_a_window_may_be_given_and_stays_inside():
    for start, window in ((0, (1, 3)), (2, (2, 4)), (9, (3, 5))):
        engine = walking(num_inference_steps=6, stochastic=(1, 5), window_size=2, window_start=start)
        assert engine.window() == window


def test_a_window_may_be_cut_at_the_end_instead_of_moved_back():
    options = {"num_inference_steps": 6, "stochastic": (1, 5), "window_size": 3, "window_shrinks": True}
    for start, window in ((0, (1, 4)), (2, (2, 5)), (3, (3, 5)), (4, (4, 5)), (9, (4, 5))):
        engine = walking(**options, window_start=start)
        assert engine.window() == window
    (row,) = engine.rollout(asked("0.5"))
    assert row.steps.at.tolist() == [4] and row.length == 1
    # a place that is drawn leaves room for all of the window
    assert walking(**options).window() in [(1, 4), (2, 5)]


def test_the_start_of_a_window_may_follow_a_schedule():
    # MixGRPO: one place further every 25 steps
    pieces = Pieces(Stream())
    rises = {"name": "linear", "start": 0, "end": 4, "steps": 100}
    options = {
        **WHOLE,
        "num_inference_steps": 8,
        "window_size": 2,
        "window_start": rises,
        "height": 2,
        "width": 2,
    }
    engine = pieces.make("engine", Piece("diffusion.denoise", options), Known())
    found = []
    for step in (0, 25, 50, 100, 200):
        pieces.tick(Clock(step))
        found.append(engine.window())
    assert found == [(0, 2), (1, 3), (2, 4), (4, 6), (4, 6)]


def test_a_share_of_the_steps_is_recorded_row_by_row():
    whole, some = (walking(num_inference_steps=11, share=share) for share in (1.0, 0.6))
    rows, parts = (engine.rollout(asked("0.5", num=12)) for engine in (whole, some))
    chosen = {tuple(row.steps.at.tolist()) for row in parts}
    assert all(len(at) == 6 and list(at) == sorted(set(at)) and at[-1] < 10 for at in chosen)
    assert len(chosen) > 6
    for row, part in zip(rows, parts, strict=True):
        assert torch.equal(row.steps.path, part.steps.path), "all steps are drawn all the same"
        assert torch.equal(row.notes["logp"][part.steps.at], part.notes["logp"])
        assert part.length == part.outcomes[0].end == 6
    assert [row.length for row in walking(share=0.01).rollout(asked("0.5"))] == [1], "at least one"


def test_a_share_is_of_the_window_wherever_that_begins():
    # 0.6 of the 5 steps from 4 to 8 are 3; of the 9 up to there it would be 5
    engine = walking(num_inference_steps=11, stochastic=(4, 9), share=0.6)
    recorded = [row.steps.at.tolist() for row in engine.rollout(asked("0.5", num=12))]
    assert {len(at) for at in recorded} == {3}
    assert {step for at in recorded for step in at} == {4, 5, 6, 7, 8}


# ---- chance


@pytest.mark.parametrize("make", [known, walking])
def test_draws_are_those_of_seed_step_prompt_and_generation(make):
    of = lambda stream, prompts=("0.2", "0.7"): paths(make(stream=stream).rollout(asked(*prompts, num=2)))
    first = of(Stream(1, step=3))
    assert torch.equal(first, of(Stream(1, step=3)))
    for other in (
        Stream(2, step=3),
        Stream(1, step=4),
        Stream(1, step=3, round=1),
        Stream(1, 3, purpose="test"),
    ):
        assert not (of(other) == first).flatten(1).all(1).any()
    assert torch.equal(of(Stream(1, step=3), ("0.7", "0.2")), first[[2, 3, 0, 1]])
    assert torch.equal(of(Stream(1, step=3), ("0.7",)), first[2:])


@pytest.mark.parametrize("make", [known, walking])
@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_the_size_of_a_batch_bounds_rows_and_changes_nothing(make, size):
    prompts = asked("0.2", "0.7", num=3)
    engine = make(batch_size=size, guidance_scale=2.0)
    rows, wanted = engine.rollout(prompts), make(guidance_scale=2.0).rollout(prompts)
    assert engine.policy.largest == min(size, 6)
    assert_close(paths(rows), paths(wanted), atol=1e-12, rtol=0)
    for row, other in zip(rows, wanted, strict=True):
        assert torch.equal(row.outcomes[0].image, other.outcomes[0].image)
        assert all(torch.allclose(row.notes[name], other.notes[name]) for name in other.notes)


def test_the_size_of_a_batch_changes_nothing_of_a_network(checkpoint):
    policy = flow(checkpoint("sd3"))
    prompts = asked(*TEXTS, num=2)
    engines = [denoise(policy, **WHOLE, guidance_scale=3.0, batch_size=size) for size in (0, 1, 3)]
    together, *apart = [engine.rollout(prompts) for engine in engines]
    for rows in apart:
        assert_close(paths(rows), paths(together), atol=1e-9, rtol=0)
        for row, other in zip(rows, together, strict=True):
            assert_close(row.notes["logp"], other.notes["logp"], atol=1e-6, rtol=0)
            assert (row.outcomes[0].image.int() - other.outcomes[0].image.int()).abs().max() <= 1


def test_rows_of_a_prompt_may_start_from_the_same_noise():
    rows = walking(same_noise=True).rollout(asked("0.2", "0.7", num=3))
    starts, ends = paths(rows)[:, 0], paths(rows)[:, -1]
    assert torch.equal(starts[0], starts[1]) and torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], starts[3]), "another prompt"
    assert not torch.equal(ends[0], ends[1]), "the noise of steps is a row's own"
    apart = paths(walking().rollout(asked("0.2", num=3)))[:, 0]
    assert not torch.equal(apart[0], apart[1])


# ---- videos


def test_videos_have_times_in_seconds(checkpoint):
    policy = flow(checkpoint("wan"), "diffusion.matching", max_sequence_length=8)
    engine = denoise(policy, num_frames=5, frames_per_second=8.0, num_inference_steps=2)
    (row,) = engine.rollout(asked("a cat"))
    (outcome,) = row.outcomes
    assert engine.shape == (4, 2, 4, 4)
    assert outcome.image is None and outcome.video.shape == (5, 3, 32, 32)
    assert outcome.video.dtype == torch.uint8
    assert_close(outcome.times, torch.tensor([0.0, 0.125, 0.25, 0.375, 0.5]))


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_inference_steps": 0}, "engine.num_inference_steps' must be at least 1, not 0"),
        ({"batch_size": -1}, "engine.batch_size' must be at least 0, not -1"),
        ({"share": 0.0}, "engine.share' must be more than 0 and at most 1, not 0.0"),
        ({"share": 1.5}, "engine.share' must be more than 0 and at most 1, not 1.5"),
        ({"stochastic": (2, 2)}, r"must be \[from, to\) within 4 denoising steps, not \(2, 2\)"),
        ({"stochastic": (-1, 2)}, r"engine.stochastic\[0\]' must be at least 0, not -1"),
        ({"stochastic": (0, 5)}, r"must be \[from, to\) within 4 denoising steps, not \(0, 5\)"),
        ({"stochastic": (0, 4)}, "holds the last of 4 steps, whose noise is .nearly. zero.*; end at 3"),
        ({"window_size": 4}, r"`window_size` is 4, but `stochastic` \(0, 3\) has 3 steps"),
        ({"window_size": -1}, "engine.window_size' must be at least 0, not -1"),
        ({"num_inference_steps": 1}, r"must be \[from, to\) within 1 denoising steps, not \(0, 0\)"),
        (
            {"solver": None},
            "has no `solver`; add for instance `solver: diffusion.flow_sde`, or set .* likelihood",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        walking(**options)


def test_an_evaluation_may_be_deterministic_whatever_is_learned_from():
    (row,) = walking(solver=None, stream=Stream(purpose="evaluate")).rollout(asked("0.5"))
    assert row.length == 0 and not len(row.notes["logp"])
    assert row.outcomes[0].image.shape == (3, 2, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"stochastic": (0, 2)},
        {"window_size": 2},
        {"share": 0.5},
        {"window_start": 1},
        {"window_shrinks": True},
    ],
)
def test_a_deterministic_engine_has_no_stochastic_steps_to_choose_from(options):
    with pytest.raises(ValueError, match="chooses among stochastic steps, but .* has no `solver`"):
        known(**options)


def test_sizes_that_do_not_divide_are_refused(checkpoint):
    policy = flow(checkpoint("sd3"), "diffusion.matching")
    with pytest.raises(ValueError, match="a multiple of 8 pixels of at most 128 high and wide, not 36 x 32"):
        denoise(policy, height=36)
    with pytest.raises(ValueError, match="engine.width' must be at least 1, not 0"):
        denoise(policy, width=0)


def test_a_step_without_noise_has_no_density():
    with pytest.raises(ConfigError, match="engine.solver.noise_level' must be more than 0, not 0.0"):
        walking(solver={"name": "diffusion.flow_sde", "noise_level": 0.0})


def test_an_unknown_way_to_integrate_is_refused():
    with pytest.raises(ConfigError, match="ode"):
        known(ode="midpoint")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_latents_that_are_no_numbers_name_prompt_and_step(value):
    engine = known()
    with pytest.raises(
        FloatingPointError, match=rf"of prompt '{value}' \(2 of 3 rows\).* after denoising step 0;"
    ):
        engine.rollout(asked("0.5") + asked(value, num=2))


def test_a_schedule_that_does_not_fall_is_refused(monkeypatch):
    monkeypatch.setattr(Known, "sigmas", lambda *given: torch.tensor([1.0, 0.5, 0.1]))
    with pytest.raises(ValueError, match="must fall strictly and end at 0"):
        known()


def test_plans_may_start_anywhere_on_the_schedule():
    # From step 2 on: what the last two steps make of a given latent.
    engine = known()
    (plan,) = engine.plans(asked("0.5"))
    (row,) = engine.follow([dataclasses.replace(plan, start=torch.ones(1, 2, 2), first=2)])
    latents, times = torch.ones(1, 1, 2, 2, dtype=torch.float64), engine.times
    for i in (2, 3):
        velocity = Normal(0.5).velocity(latents, times[i : i + 1])
        ahead = euler_step(latents, velocity, times[i : i + 1], times[i + 1 : i + 2])
        if i == 3:
            assert_close(ahead, clean_estimate(latents, velocity, times[3:4]))
        latents = ahead
    assert_close(row.steps.path[-1], latents[0])
    assert engine.policy.evaluations == 2
