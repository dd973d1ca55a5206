"""The flow policy: the ratio of a first update, texts, recorded answers, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmrl.config.binding import Pieces
from mmrl.config.registry import Needs
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.diffusion.model_family import Request, family_of, texts_of
from mmrl.training.loop import evaluate_references
from tests.diffusion.flows import SOLVERS, TEXTS, asked, denoise, flow, make, picture

MATCHING = {"name": "diffusion.matching", "draws": 2, "time_type": "uniform"}
EVERYTHING = {
    "diffusion.transition": {"mean", "std", "dt", "velocity", "time"},
    "diffusion.matching": {"velocity", "target", "time", "error"},
}


@pytest.fixture(scope="module")
def walker(checkpoint):
    """Load a policy of stochastic steps, in float64; nobody changes its weights."""
    return flow(checkpoint("sd3"))


@pytest.fixture(scope="module")
def matcher(checkpoint):
    """Load a policy of draws, in float64; nobody changes its weights."""
    return flow(checkpoint("sd3"), MATCHING)


def walked(policy, **options):
    """Make a batch of two rows for each of two prompts, three stochastic steps each."""
    engine = denoise(policy, **{"solver": "diffusion.flow_sde", **options})
    return policy.collate(engine.rollout(asked(*TEXTS, num=2)))


def old(policy, batch, size=100, extra=frozenset()):
    """Ask the policy about a batch in micro-batches, as the trainer does."""
    return evaluate_references({"old": policy}, batch, Needs(others={"old": frozenset(extra)}), size).others[
        "old"
    ]


# ---- the ratio


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("name", SOLVERS)
def test_the_ratio_is_1_on_the_first_update(walker, name, guidance_scale):
    batch = walked(walker, solver=f"diffusion.{name}", guidance_scale=guidance_scale)
    noted = batch.notes["logp"]
    assert noted.shape == (4, 3) and noted.std() > 1e-3
    for size in (1, 2, 5, 6, 100):
        logp = old(walker, batch, size).logp
        # Notes are float32, so ratios of cps and of normal densities agree to its precision.
        assert_close(logp.float(), noted, atol=2e-6, rtol=0)
    assert walker(batch).logp.requires_grad


@pytest.mark.parametrize("name", SOLVERS)
def test_the_ratio_is_1_behind_a_window_or_a_share(walker, name):
    for options in ({"stochastic": (1, 3)}, {"window_size": 1, "window_start": 2}, {"share": 0.5}):
        batch = walked(walker, solver=f"diffusion.{name}", **options)
        assert_close(old(walker, batch, 2).logp.float(), batch.notes["logp"], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2)])
def test_the_ratio_is_1_in_lower_precision(checkpoint, dtype, tolerance):
    policy = flow(checkpoint("sd3"), dtype=dtype)
    batch = walked(policy, guidance_scale=2.0)
    assert policy.precision == torch.float32
    assert policy(batch).logp.dtype == torch.float32
    for size in (4, 100):
        assert_close(old(policy, batch, size).logp, batch.notes["logp"], atol=tolerance, rtol=0)


def test_another_policy_has_another_ratio(checkpoint):
    policy = flow(checkpoint("sd3"))
    batch = walked(policy)
    with torch.no_grad():
        policy.network.proj_out.weight.mul_(1.5)
    assert (old(policy, batch).logp - batch.notes["logp"]).abs().min() > 1e-3


@pytest.mark.parametrize("likelihood", sorted(EVERYTHING))
def test_cuts_of_rows_and_steps_say_what_the_whole_says(walker, matcher, likelihood):
    policy = {"diffusion.transition": walker, "diffusion.matching": matcher}[likelihood]
    names = EVERYTHING[likelihood]
    assert policy.outputs == names
    batch = policy.collate(
        denoise(policy, solver="diffusion.cps", guidance_scale=2.0).rollout(asked(*TEXTS, num=2))
    )
    with torch.no_grad():
        whole = policy(batch, names)
    assert whole.extra.keys() == names
    # 2 calls a step: 2 steps, then rows of 3 (or 2) steps, then all.
    for size in (1, 4, 7, 1000):
        cut = old(policy, batch, size, names)
        assert_close(cut.logp, whole.logp, atol=1e-9, rtol=0)
        for name in names:
            assert_close(cut.extra[name], whole.extra[name], atol=1e-9, rtol=0)


def test_the_gradient_is_the_sum_over_micro_batches(checkpoint):
    policy = flow(checkpoint("sd3"))
    batch = walked(policy, guidance_scale=2.0)
    slope = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for size in (1000, 6, 2):
        policy.module.zero_grad()
        for rows, columns in batch.cuts(size, batch.steps.unit):
            (policy(batch.select(rows, columns)).logp * slope[rows][:, columns]).sum().backward()
        found.append([p.grad.clone() for p in policy.network.parameters() if p.grad is not None])
    for other in found[1:]:
        for gradient, wanted in zip(other, found[0], strict=True):
            assert_close(gradient, wanted, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("likelihood", sorted(EVERYTHING))
def test_weights_have_the_gradient_of_finite_differences(checkpoint, likelihood):
    policy = flow(
        checkpoint("sd3"), {"name": likelihood, **({"draws": 2} if "matching" in likelihood else {})}
    )
    batch = policy.collate(
        denoise(policy, solver="diffusion.flow_sde", guidance_scale=2.0, num_inference_steps=5).rollout(
            asked("a cat")
        )
        if "transition" in likelihood
        else denoise(policy, num_inference_steps=5).rollout(asked("a cat"))
    )
    weight = policy.network.proj_out.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy(batch).logp.sum().backward()
    values = []
    with torch.no_grad():
        for shift in (1e-5, -1e-5):
            moved = weight + shift * direction
            kept, weight.data = weight.data, moved
            values.append(float(policy(batch).logp.sum()))
            weight.data = kept
    slope = float((weight.grad * direction).sum())
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(slope, rel=1e-5)


# ---- texts and guidance


def test_a_text_is_read_once_and_rows_of_one_prompt_share_it(checkpoint, monkeypatch):
    policy = flow(checkpoint("sd3"))
    read = []
    encode = type(policy.family).encode
    monkeypatch.setattr(
        type(policy.family),
        "encode",
        lambda self, pipe, requests, most: (
            read.extend(texts_of(requests)) or encode(self, pipe, requests, most)
        ),
    )
    batch = walked(policy, guidance_scale=2.0)
    assert read == [TEXTS[0], "", TEXTS[1]]
    assert len(batch.steps.conditioning.conditions) == 2 and batch.steps.conditioning.which.tolist() == [
        0,
        0,
        1,
        1,
    ]
    old(policy, batch)
    walked(policy, guidance_scale=2.0)
    assert len(read) == 3
    cut = batch.select(torch.tensor([2, 3])).steps.conditioning
    assert len(cut.conditions) == 1 and cut.which.tolist() == [0, 0]


def test_guidance_leads_away_from_the_negative_prompt(checkpoint):
    plain, negative = (flow(checkpoint("sd3"), negative_prompt=text) for text in ("", "a blurred picture"))
    pictures = [
        denoise(p, solver="diffusion.cps", guidance_scale=4.0).rollout(asked("a cat"))
        for p in (plain, negative)
    ]
    assert (pictures[0][0].steps.path[-1] - pictures[1][0].steps.path[-1]).abs().max() > 1e-3
    alone = [
        denoise(p, solver="diffusion.cps", guidance_scale=1.0).rollout(asked("a cat"))
        for p in (plain, negative)
    ]
    assert torch.equal(alone[0][0].steps.path, alone[1][0].steps.path)


def test_guidance_above_1_asks_twice_and_others_once(walker):
    for scale, passes in ((1.0, 1), (4.5, 2), (0.0, 1), (1.001, 2)):
        before = walker.evaluations
        denoise(walker, solver="diffusion.cps", guidance_scale=scale).rollout(asked("a cat"))
        assert walker.evaluations - before == 4 * passes


def test_guidance_that_is_an_input_needs_no_second_call(checkpoint):
    policy = flow(checkpoint("flux"), max_sequence_length=16)
    assert policy.passes(3.5) == 1
    rows = [
        denoise(policy, solver="diffusion.cps", guidance_scale=g).rollout(asked("a cat")) for g in (1.0, 3.5)
    ]
    assert (rows[0][0].steps.path[-1] - rows[1][0].steps.path[-1]).abs().max() > 1e-4


def test_texts_too_long_name_the_prompt(walker):
    with pytest.raises(ValueError, match="cannot read the prompt 'aaaa.*it is 102 tokens long"):
        walker.condition(Request("a" * 100))


# ---- recorded answers


def test_a_recorded_image_is_a_row_without_a_path(matcher):
    shown = Outcome(image=picture())
    (prompt,) = asked("a cat", answers=[shown])
    row = matcher.encode(prompt, shown)
    assert not row.on_policy and row.length == 2 and not row.notes and row.outcomes == (shown,)
    latents = matcher.family.compress(matcher.pipe, picture()[None] / 255)[0]
    assert_close(row.steps.path, latents[None].double(), atol=1e-6, rtol=0)
    with torch.no_grad():
        assert matcher(matcher.collate((row, row))).logp.isfinite().all()


def test_stored_images_and_rollouts_of_guidance_1_are_learned_from_together(matcher):
    prompts = asked(*TEXTS, num=2, answers=[Outcome(image=picture())])
    engine = make("engine", "with_demos", denoise(matcher, solver="diffusion.flow_sde"), per_group=1)
    rows = engine.rollout(prompts)
    assert sorted(row.on_policy for row in rows) == [False, False, True, True]
    batch = matcher.collate(rows)
    assert batch.mask.shape == (4, 2)
    guided = make("engine", "with_demos", denoise(matcher, guidance_scale=4.5), per_group=1)
    with pytest.raises(ValueError, match="one guidance scale, but.*recorded images count as guidance 1"):
        matcher.collate(guided.rollout(prompts))


def test_a_recorded_video_is_a_row(checkpoint):
    policy = flow(checkpoint("wan"), MATCHING, max_sequence_length=8)
    shown = Outcome(video=picture(frames=5), times=torch.arange(5) / 16)
    row = policy.encode(*asked("a cat"), shown)
    assert row.steps.path.shape == (1, 4, 2, 4, 4)


def test_recorded_answers_that_hold_no_image_are_refused(matcher):
    with pytest.raises(ValueError, match="answer of prompt 'a cat' holds neither an image nor a video"):
        matcher.encode(*asked("a cat"), Outcome(text="meow"))


def test_recorded_images_are_no_stochastic_steps(walker):
    row = walker.encode(*asked("a cat"), Outcome(image=picture()))
    with pytest.raises(ValueError, match="prompt 'a cat' holds no stochastic steps: a recorded image"):
        walker.collate((row,))


def test_discrete_times_want_the_schedule_of_a_rollout(checkpoint):
    policy = flow(checkpoint("sd3"), "diffusion.matching")
    row = policy.encode(*asked("a cat"), Outcome(image=picture()))
    with pytest.raises(
        ValueError, match="recorded images have none; set `time_type: uniform` or `logit_normal`"
    ):
        policy.collate((row,))


# ---- numbers that are none


def test_a_decoder_that_overflows_names_the_cure(walker, monkeypatch):
    monkeypatch.setattr(type(walker.family), "decode", lambda self, pipe, latents: latents[:, :3] / 0)
    with pytest.raises(FloatingPointError, match="the decoder made 2 of 2 images .* its precision overflows"):
        walker.decode(torch.ones(2, 4, 4, 4))


def test_a_decoder_computes_in_float32_where_the_network_is_in_float16(checkpoint):
    policy = flow(checkpoint("sd3"), dtype="float16")
    assert policy.pipe.vae.dtype == torch.float32
    assert policy.pipe.text_encoder.dtype == torch.float16
    assert {p.dtype for p in policy.network.parameters()} == {torch.float32}, "they learn"
    assert policy.decode(torch.zeros(1, 4, 4, 4)).shape == (1, 3, 32, 32)


def test_a_network_that_diverges_names_prompt_and_step(checkpoint):
    policy = flow(checkpoint("sd3"))
    with torch.no_grad():
        policy.network.proj_out.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="latents of prompt 'a cat' .1 of 1 rows. are NaN .* step 0"):
        denoise(policy, solver="diffusion.cps").rollout(asked("a cat"))


def test_pixels_are_rounded_and_kept_inside(walker, monkeypatch):
    # .5 * 255 = 127.5, to the even 128
    values = torch.tensor([-3.0, 0.5, 7.0]).view(1, 3, 1, 1)
    monkeypatch.setattr(type(walker.family), "decode", lambda self, pipe, latents: values)
    assert walker.decode(torch.ones(1, 4, 4, 4)).flatten().tolist() == [0, 128, 255]


# ---- doors


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot load the pipeline '.*nothing'"):
        flow(tmp_path / "nothing")


def test_an_adapter_without_a_rank_is_refused(checkpoint):
    with pytest.raises(
        ValueError, match="to go on with the adapter 'somewhere', `lora_rank` must name its rank"
    ):
        flow(checkpoint("sd3"), adapter="somewhere")


def test_a_pipeline_that_no_family_serves_is_refused():
    with pytest.raises(
        ValueError, match="no family serves the pipeline 'AudioPipeline'; there are .*StableDiffusion3"
    ):
        family_of("AudioPipeline")


def test_only_the_network_learns(walker):
    assert {name.split(".")[0] for name, p in walker.module.named_parameters()} == {"network"}
    learning = [p.requires_grad for p in walker.module.parameters()]
    assert all(learning)
    for part in (walker.pipe.vae, walker.pipe.text_encoder, walker.pipe.text_encoder_2):
        assert not any(p.requires_grad for p in part.parameters())


def test_every_likelihood_says_what_the_policy_may():
    pieces = Pieces(Stream())
    entry = pieces.check(
        "policy", Piece("diffusion.flow", {"model": "none", "likelihood": "diffusion.matching"})
    )
    assert entry.target.outputs == set().union(*EVERYTHING.values())
