"""Draws of time and noise as a step table, without a network: what they say of given velocities."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from mmrl.core.rng import Stream
from mmrl.core.step_table import StepOutput
from mmrl.core.types import Unit
from mmrl.diffusion.flow_math import noised
from mmrl.diffusion.likelihoods.matching import WEIGHTINGS, MatchingSteps
from mmrl.diffusion.steps import FlowRow
from tests.diffusion.flows import make, sd3_times

TIMES = sd3_times(14).float()
SHAPE = (2, 3, 4)
EVERYTHING = frozenset({"velocity", "target", "time", "error"})


def likelihood(**options):
    return make("likelihood", "diffusion.matching", **options)


def row(generator, *, shape=SHAPE, times=TIMES, guidance=1.0, passes=1, at=(), frames=None):
    clean = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
    if frames is None:
        frames = (1,) * shape[1] if len(shape) == 4 else ()
    return FlowRow({}, clean, torch.tensor(at, dtype=torch.int64), times, guidance, passes, frames=frames)


def recorded(generator, **options):
    return row(generator, times=torch.zeros(0), **options)


def collated(rows, uids=(), stream=None, **options) -> MatchingSteps:
    return likelihood(stream=stream, **options).collate(rows, uids or [f"p{i}" for i in range(len(rows))])


def some_velocity(steps, generator):
    return torch.randn(*steps.states()[0].shape, generator=generator, dtype=torch.float64)


# ---- worked numbers


@pytest.mark.parametrize(
    ("error", "time", "published"),
    [
        (0.01, 0.5, (-0.01, -0.005, -0.0025, -0.049995, -0.626131)),
        (0.01, 0.9, (-0.01, -0.009, -0.0081, -0.089991, -1.127036)),
        (0.1, 0.5, (-0.1, -0.05, -0.025, -0.158109, -1.118358)),
        (0.1, 0.9, (-0.1, -0.09, -0.081, -0.284596, -2.013045)),
        (1.0, 0.5, (-1.0, -0.5, -0.25, -0.499995, -1.993675)),
        (1.0, 0.9, (-1.0, -0.9, -0.81, -0.899991, -3.588616)),
        (0.025, 0.5, (-0.025, -0.0125, -0.00625, -0.079052, -0.788946)),
        (0.0, 0.5, (0.0, 0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_the_published_weightings(error, time, published):
    # -d, -t d, -t^2 d, -t (sqrt(d + 1e-10) - 1e-5), -4 t ((d + 1e-10)^.25 - 1e-10^.25)
    given = (torch.tensor(value, dtype=torch.float64) for value in (error, time))
    error, time = given
    found = [-WEIGHTINGS[name](error, time, 0.25) for name in ("uniform", "t", "t2", "huber", "ghuber")]
    assert_close(torch.stack(found), torch.tensor(published, dtype=torch.float64), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "slope"),
    [("uniform", -1.0), ("t", -0.5), ("t2", -0.25), ("huber", -1.581139), ("ghuber", -7.952707)],
)
def test_the_published_slopes(name, slope):
    # -w(t, d) with w = 1, t, t^2, t / (2 sqrt d), t d^-.75 at d = .025 and t = .5
    error = torch.tensor(0.025, dtype=torch.float64, requires_grad=True)
    (-WEIGHTINGS[name](error, torch.tensor(0.5, dtype=torch.float64), 0.25)).backward()
    assert float(error.grad) == pytest.approx(slope, abs=2e-6)


@pytest.mark.parametrize(
    ("weighting", "logp"),
    [("uniform", -0.025), ("t", -0.0125), ("t2", -0.00625), ("huber", -0.079052), ("ghuber", -0.788946)],
)
def test_the_published_vector(weighting, logp, generator, monkeypatch):
    # x_0 = (.4, -.2), noise (1, -.5): target (.6, -.3), and v = (.5, -.1) misses it by (-.1, .2): d = .025
    numbers = lambda *values: torch.tensor(values, dtype=torch.float64).view(1, 1, 2)
    made = FlowRow({}, numbers(0.4, -0.2)[0], torch.zeros(0).long(), torch.tensor([1.0, 0.5, 0.0]))
    given = {"draws": 1, "fraction": 1.0, "time_type": "discrete_wo_init"}
    steps = collated([made], weighting=weighting, **given)
    monkeypatch.setattr(MatchingSteps, "noise", lambda self: numbers(1.0, -0.5))
    latents, time = steps.states()
    assert time.tolist() == [[0.5]]
    assert_close(latents, numbers(0.7, -0.35))
    said = steps.read(numbers(0.5, -0.1), EVERYTHING)
    assert_close(said.extra["target"], numbers(0.6, -0.3))
    assert float(said.extra["error"]) == pytest.approx(0.025, abs=1e-12)
    assert float(said.logp) == pytest.approx(logp, abs=2e-6)


# ---- what is said


def test_states_mix_image_and_noise_and_the_target_leads_back(generator):
    rows = [row(generator) for _ in range(3)]
    steps = collated(rows, draws=4)
    latents, times = steps.states()
    target = steps.read(some_velocity(steps, generator), {"target"}).extra["target"]
    assert latents.shape == target.shape == (3, 4, *SHAPE)
    assert times.shape == (3, 4)
    for i in range(3):
        for j in range(4):
            clean, noise = rows[i].path[-1], target[i, j] + rows[i].path[-1]
            assert_close(latents[i, j], noised(clean[None], noise[None], times[i, j])[0])
    # Where the velocity is the target nothing is missed, and nothing is as likely.
    exact = steps.read(target, {"error"})
    assert not exact.extra["error"].any() and not exact.logp.any()
    assert (steps.read(1.01 * target, frozenset()).logp < 0).all()


def test_noise_is_normal_and_the_same_at_every_call(generator):
    steps = collated([row(generator, shape=(8, 8, 8)) for _ in range(4)])
    noise = steps.noise()
    assert torch.equal(noise, steps.noise())
    assert abs(noise.mean()) < 5 / noise.numel() ** 0.5
    assert noise.std() == pytest.approx(1, abs=0.02)
    flat = noise.flatten(0, 1).flatten(1)
    assert len({tuple(one[:3].tolist()) for one in flat}) == len(flat), "every draw has its own"


@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
@pytest.mark.parametrize("segments", [1, 2])
def test_the_error_and_its_density_have_the_gradient_of_finite_differences(generator, weighting, segments):
    shape = (2, 2, 2, 2) if segments > 1 else (2, 2, 2)
    steps = collated(
        [row(generator, shape=shape) for _ in range(2)], draws=2, weighting=weighting, segments=segments
    )
    velocity = some_velocity(steps, generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: steps.read(v, frozenset()).logp, velocity)
    assert torch.autograd.gradcheck(lambda v: steps.read(v, {"error"}).extra["error"], velocity)


def test_the_gradient_of_a_perfect_match_is_0(generator):
    # The slope of ghuber at d = 0 is t 1e-10^-.75 = t 3e7, times a gradient of d that is 0.
    steps = collated([row(generator)], draws=2)
    target = steps.read(some_velocity(steps, generator), {"target"}).extra["target"].requires_grad_()
    steps.read(target, frozenset()).logp.sum().backward()
    assert not target.grad.any()


def test_float32_velocities_are_compared_in_float64(generator):
    steps = collated([row(generator)], draws=2)
    velocity = some_velocity(steps, generator).float()
    said = steps.read(velocity, {"error", "target"})
    assert said.logp.dtype == said.extra["error"].dtype == said.extra["target"].dtype == torch.float32
    # 1e-30 squared is no float32
    error = steps.error(torch.full((1, 1, 2), 1e-30), torch.zeros(1, 1, 2))
    assert float(error) == pytest.approx(1e-60, rel=1e-6)


def test_nothing_is_said_that_was_not_asked_for(generator):
    steps = collated([row(generator)])
    assert steps.read(some_velocity(steps, generator), frozenset()).extra == {}
    assert set(steps.read(some_velocity(steps, generator), EVERYTHING).extra) == EVERYTHING


# ---- what is drawn


def drawn(steps):
    return steps.times.tolist(), steps.noise().flatten(2)[..., 0].tolist()


@pytest.mark.parametrize("time_type", ["discrete_wo_init", "uniform", "logit_normal"])
def test_draws_are_those_of_seed_step_prompt_and_generation(generator, time_type):
    rows = [row(generator) for _ in range(4)]
    uids = ["a", "b", "a", "b"]
    usual = {"time_type": time_type, "draws": 3}
    of = lambda stream, order: drawn(
        collated([rows[i] for i in order], [uids[i] for i in order], stream, **usual)
    )
    first = of(Stream(1, step=2), [0, 1, 2, 3])
    assert first == of(Stream(1, step=2), [0, 1, 2, 3])
    for other in (Stream(1, step=3), Stream(2, step=2)):
        again = of(other, [0, 1, 2, 3])
        assert again[0] != first[0] and again[1] != first[1]
    # Another order of prompts: every row keeps its draws. The second row of a prompt has others.
    turned = of(Stream(1, step=2), [1, 0, 3, 2])
    assert [[part[i] for i in (1, 0, 3, 2)] for part in turned] == [list(part) for part in first]
    assert first[1][0] != first[1][2]


@pytest.mark.parametrize(
    ("options", "times", "noise"),
    [({}, False, False), ({"shared_time": True}, True, False), ({"shared_noise": True}, True, True)],
)
def test_what_rows_of_a_group_share(generator, options, times, noise):
    rows = [recorded(generator) for _ in range(4)]
    steps = collated(rows, ["a", "a", "b", "b"], time_type="uniform", draws=3, **options)
    drawn_noise = steps.noise()
    for same, other in ((0, 1), (2, 3)):
        assert torch.equal(steps.times[same], steps.times[other]) == times
        assert torch.equal(drawn_noise[same], drawn_noise[other]) == noise
    assert not torch.equal(steps.times[0], steps.times[2])
    assert not torch.equal(drawn_noise[0], drawn_noise[2])
    # The draws of one row differ from each other in any case.
    assert not torch.equal(drawn_noise[0, 0], drawn_noise[0, 1])


def test_recorded_images_and_rollouts_make_one_table(generator):
    # A row that kept its path or recorded steps is read by its image all the same.
    walked = row(generator, at=(0, 1))
    steps = collated([recorded(generator), row(generator), walked], time_type="uniform", draws=2)
    assert_close(steps.clean[2], walked.path[-1])
    with pytest.raises(ValueError, match="discrete times index the schedule of the rollout"):
        collated([row(generator), recorded(generator)])


def test_the_image_is_the_last_state_of_a_path(generator):
    walked = row(generator)
    path = torch.cat([walked.path + 1, walked.path])
    steps = collated([dataclasses.replace(walked, path=path)])
    assert_close(steps.clean[0], walked.path[0])


def test_a_video_as_a_whole_needs_no_number_of_frames(generator):
    steps = collated([row(generator, shape=(2, 6, 3, 2), frames=())], draws=1, segments=1)
    assert steps.clean.shape[2] == 6


def test_times_of_a_shared_collection_come_from_the_schedule(generator):
    steps = collated([row(generator) for _ in range(3)])
    assert torch.isin(steps.times, TIMES).all()
    assert torch.equal(steps.times[0], steps.times[1]) and torch.equal(steps.times[0], steps.times[2])


# ---- cuts


@pytest.mark.parametrize("columns", [slice(None), slice(0, 1), slice(1, 4)])
@pytest.mark.parametrize("kept", [[1], [2, 0], [0, 1, 2]])
def test_cuts_say_what_the_whole_says(generator, kept, columns):
    steps = collated([row(generator) for _ in range(3)], draws=4)
    velocity = some_velocity(steps, generator)
    whole, chosen = steps.read(velocity, EVERYTHING), torch.tensor(kept)
    part = steps[chosen, columns]
    said = part.read(velocity[chosen][:, columns], EVERYTHING)
    assert torch.equal(said.logp, whole.logp[chosen][:, columns])
    for name in EVERYTHING:
        assert torch.equal(said.extra[name], whole.extra[name][chosen][:, columns])
    assert torch.equal(part.states()[0], steps.states()[0][chosen][:, columns])


def test_the_cost_is_the_number_of_network_calls(generator):
    steps = collated([row(generator, guidance=4.5, passes=2) for _ in range(3)], draws=4)
    assert steps.cost(torch.arange(3)) == 3 * 4 * 2
    film = collated([row(generator, shape=(2, 6, 2, 2)) for _ in range(3)], draws=4, segments=3)
    assert film.cost(torch.arange(2)) == 2 * 4, "segments of a draw share its call"


# ---- segments


def film(generator, frames=6, num=2):
    return [row(generator, shape=(2, frames, 3, 2)) for _ in range(num)]


def test_one_segment_is_the_whole_clip(generator):
    rows = film(generator)
    plain, one = collated(rows, draws=2), collated(rows, draws=2, segments=1)
    velocity = some_velocity(plain, generator)
    said: list[StepOutput] = [steps.read(velocity, EVERYTHING) for steps in (plain, one)]
    assert torch.equal(said[0].logp, said[1].logp)


@pytest.mark.parametrize("segments", [2, 3, 6])
def test_segments_of_as_many_frames_add_up_to_the_whole(generator, segments):
    rows = film(generator)
    whole, cut = (collated(rows, draws=2, segments=n, weighting="t") for n in (1, segments))
    velocity = some_velocity(whole, generator)
    all_at_once, apart = (steps.read(velocity, EVERYTHING) for steps in (whole, cut))
    assert apart.logp.shape == (2, 2 * segments)
    # Steps are the draws of the first segment, then those of the next; the mean over segments is the whole.
    for name, unit in (("error", apart.extra["error"]), ("logp", apart.logp)):
        wanted = all_at_once.logp if name == "logp" else all_at_once.extra[name]
        assert_close(unit.view(2, segments, 2).mean(1), wanted)
    for name in ("time", "velocity", "target"):
        assert torch.equal(apart.extra[name][:, :2], all_at_once.extra[name])
    assert likelihood(draws=2, segments=segments).length(rows[0]) == 2 * segments
    assert cut.unit == Unit.ROW and whole.unit == Unit.STEP


def test_a_frame_belongs_to_the_segment_that_holds_its_centre(generator):
    # 5 frames in 2 segments of 2.5: centres .5, 1.5 | 2.5 (the cut itself: to the later), 3.5, 4.5.
    steps = collated(film(generator, frames=5, num=1), draws=1, segments=2, weighting="uniform")
    target = steps.read(some_velocity(steps, generator), {"target"}).extra["target"][:, :1]
    off = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64).view(1, 1, 1, 5, 1, 1)
    error = -steps.read(target + off, frozenset()).logp
    # (1 + 4) / 2 and (9 + 16 + 25) / 3
    assert_close(error, torch.tensor([[2.5, 50 / 3]], dtype=torch.float64))


def test_a_latent_frame_belongs_to_where_most_of_its_frames_are(generator):
    # 17 frames in 2 segments of 8.5: the third latent frame stands for frames 5 to 8, of which three are in
    # the first half. Cut by latents it would be in the second.
    (made,) = [row(generator, shape=(2, 5, 3, 2), frames=(1, 4, 4, 4, 4))]
    steps = collated([made], draws=1, segments=2, weighting="uniform")
    target = steps.read(some_velocity(steps, generator), {"target"}).extra["target"][:, :1]
    off = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64).view(1, 1, 1, 5, 1, 1)
    error = -steps.read(target + off, frozenset()).logp
    # (1 + 4 + 9) / 3 and (16 + 25) / 2
    assert_close(error, torch.tensor([[14 / 3, 20.5]], dtype=torch.float64))


def test_segments_that_no_latent_frame_belongs_to_are_refused(generator):
    # 81 frames in 21 segments: 27/7 frames each. Centres are at .5, 3, 7, ..., 79: that at 27 is where
    # segment 7 begins, and the one before, 23, lies in segment 5 (5.96).
    made = row(generator, shape=(1, 21, 1, 1), frames=(1, *[4] * 20))
    with pytest.raises(ValueError, match=r"stand for 81 frames of video, none .* in segment 6 \("):
        collated([made], draws=1, segments=21)


def test_rows_that_do_not_say_what_latent_frames_stand_for_are_refused(generator):
    with pytest.raises(
        ValueError, match="a row of 6 latent frames has the number of video frames of 0 of them"
    ):
        collated([row(generator, shape=(2, 6, 3, 2), frames=())], draws=1, segments=2)


def test_cut_rows_keep_their_segments(generator):
    steps = collated(film(generator, num=3), draws=2, segments=3)
    velocity = some_velocity(steps, generator)
    part = steps[torch.tensor([2]), slice(None)]
    assert torch.equal(part.read(velocity[2:], frozenset()).logp, steps.read(velocity, frozenset()).logp[2:])


def test_every_segment_of_as_many_or_more_frames_holds_one(generator):
    for frames in range(2, 12):
        for segments in range(2, frames + 1):
            steps = collated(film(generator, frames=frames, num=1), draws=1, segments=segments)
            assert steps.read(some_velocity(steps, generator), frozenset()).logp.isfinite().all()


def test_more_segments_than_frames_are_refused(generator):
    with pytest.raises(
        ValueError,
        match=r"`segments` is 3, but of the 2 frames in latents of \(2, 2, 3, 2\).* in segment 1 \(",
    ):
        collated(film(generator, frames=2), draws=1, segments=3)


def test_images_have_no_segments(generator):
    with pytest.raises(ValueError, match=r"`segments` is 2, but of the 1 frames in latents of \(2, 3, 4\)"):
        collated([row(generator)], draws=1, segments=2)


# ---- doors


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"draws": 0}, "likelihood.draws' must be at least 1, not 0"),
        ({"segments": 0}, "likelihood.segments' must be at least 1, not 0"),
        ({"power": 0.0}, "likelihood.power' must be more than 0, not 0.0"),
        ({"lowest": 1.0}, "likelihood.lowest' must be at least 0 and less than 1, not 1.0"),
        ({"lowest": -0.5}, "likelihood.lowest' must be at least 0 and less than 1, not -0.5"),
        ({"fraction": 0.0}, "likelihood.fraction' must be more than 0 and at most 1, not 0.0"),
        ({"fraction": 1.1}, "likelihood.fraction' must be more than 0 and at most 1, not 1.1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        likelihood(**options)
    likelihood(lowest=0.0, fraction=1.0)


@pytest.mark.parametrize("odd", [{"guidance": 4.5}, {"passes": 2}])
def test_rows_of_other_settings_are_refused(generator, odd):
    with pytest.raises(ValueError, match="diffusion.matching wants rows of one guidance scale, but"):
        collated([row(generator), row(generator, **odd)])
