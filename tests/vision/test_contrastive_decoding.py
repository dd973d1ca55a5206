"""Contrastive decoding: against transformers' guided generation, at its ends, and how it is batched."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.vision.decoding.decoding import draw_tokens
from mmrl.vision.decoding.token_steps import FORBIDDEN
from mmrl.vision.engines.contrastive_decoding import ContrastiveDecoding, mixed
from mmrl.vision.engines.generate import Generate
from mmrl.vision.media.prompts import without_media
from tests.support.tables import assert_rows
from tests.vision import mixed as asked
from tests.vision import tiny

FAMILY = "llava"


@pytest.fixture
def policy(exact):
    return exact(FAMILY)


def pictures(num: int = 2) -> list[Prompt]:
    return [tiny.ask(f"p{i}", tiny.picture(seed=i), "what is the fox" if i else "what") for i in range(num)]


def mixing(policy, prompts, seed: int = 0, length: int = 8, generate=(), **options):
    """Answer prompts with a dial that does not tremble."""
    stream = Stream(seed)
    settings = {"max_completion_length": length, **dict(generate)}
    ratios = options.get("contrast_alpha", (0.6,))
    options = {"contrast_alpha_std": (0.0,) * len(ratios), **options}
    return ContrastiveDecoding(Generate(policy, stream=stream, **settings), stream=stream, **options).rollout(
        prompts
    )


def said(rows):
    return [row.steps.ids.tolist() for row in rows]


def plainly(policy, prompt, ids):
    """Give the logits of tokens behind a prompt: one sequence, no cache, placeholders out."""
    encoded = policy.prompt_encoder.encode(prompt)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.cat([encoded.ids, ids])[None], use_cache=False, **encoded.media)
    logits = logits.logits[0, len(encoded.ids) - 1 : -1].float()
    return logits.index_fill(-1, torch.tensor(policy.prompt_encoder.placeholders), FORBIDDEN)


# ---- the formula


def test_the_two_mixtures_have_worked_values():
    p, q = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.2, 0.8]]).log()
    half = torch.full((1, 1), 0.5)
    # equal shares of opposites are even in both; a quarter: .75 * .8 + .25 * .2 = .65
    assert_rows(mixed(p, q, half, "log").softmax(-1), [[0.5, 0.5]])
    assert_rows(mixed(p, q, half / 2, "prob").exp(), [[0.65, 0.35]])
    # (.8 / .2) to the power of 1 - 2 h = 1/2 is 2: shares 2/3 and 1/3
    assert_rows(mixed(p, q, half / 2, "log").softmax(-1), [[2 / 3, 1 / 3]])
    # h = -1/2: odds 4 to the power of 2
    assert_rows(mixed(p, q, -half, "log").softmax(-1), [[16 / 17, 1 / 17]])


def test_log_mixtures_leave_the_image_step_by_step(generator):
    p, q = torch.randn(2, 4, 50, generator=generator).log_softmax(-1)
    gaps = []
    for h in torch.linspace(0, 1, 11):
        mixture = mixed(p, q, h.expand(4, 1), "log").log_softmax(-1)
        gaps.append((mixture.exp() * (mixture - p)).sum(-1))
    assert (torch.stack(gaps).diff(dim=0) >= -1e-6).all() and gaps[0].abs().max() < 1e-6


@pytest.mark.parametrize("h", [0.3, 1.0, -0.5])
def test_greedy_answers_are_those_of_the_guided_generation_of_transformers(policy, h):
    """Scores too: transformers mixes log-probabilities, unnormalised, before anything else."""
    for prompt in pictures():
        encoded, blind = (
            policy.prompt_encoder.encode(prompt),
            policy.prompt_encoder.encode(without_media(prompt)),
        )
        theirs = policy.model.generate(
            input_ids=encoded.ids[None],
            attention_mask=torch.ones_like(encoded.ids)[None],
            **encoded.media,
            guidance_scale=1 - h,
            negative_prompt_ids=blind.ids[None],
            negative_prompt_attention_mask=torch.ones_like(blind.ids)[None],
            suppress_tokens=policy.prompt_encoder.placeholders,
            max_new_tokens=8,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        (row,) = mixing(policy, [prompt], contrast_alpha=(h,), generate={"temperature": 0.0})
        assert said([row]) == [theirs.sequences[0, -row.length :].tolist()]
        scores = torch.cat(theirs.scores).log_softmax(-1)
        logp = scores.gather(1, row.steps.ids[:, None])[:, 0].float()
        torch.testing.assert_close(row.notes["logp"], logp, rtol=0, atol=2e-5)
        plain = -(scores.exp() * scores.clamp(min=-1e4)).sum(-1).float()
        torch.testing.assert_close(row.notes["entropy"], plain, rtol=0, atol=2e-5)


@pytest.mark.parametrize("mix", ["log", "prob"])
def test_the_noted_numbers_are_those_of_the_mixture_that_was_drawn_from(policy, mix):
    settings = {"temperature": 0.7, "top_k": 5}
    for row in mixing(policy, pictures(), contrast_alpha=(0.4,), mix=mix, generate=settings):
        seen, unseen = (
            plainly(policy, prompt, row.steps.ids).log_softmax(-1)
            for prompt in (row.prompt, without_media(row.prompt))
        )
        logits = mixed(seen, unseen, torch.full((row.length, 1), 0.4), mix)
        logp = (logits / 0.7).log_softmax(-1)
        entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)
        kept = logp.masked_fill(logp < logp.topk(5).values[:, -1:], -torch.inf).log_softmax(-1)
        torch.testing.assert_close(
            row.notes["logp"], kept.gather(1, row.steps.ids[:, None])[:, 0], rtol=0, atol=5e-5
        )
        torch.testing.assert_close(row.notes["entropy"], entropy, rtol=0, atol=5e-5)


# ---- its ends


@pytest.mark.parametrize("mix", ["log", "prob"])
def test_0_is_plain_decoding_and_1_is_blind(policy, mix):
    prompts = pictures()
    for h, shown in ((0.0, prompts), (1.0, [without_media(prompt) for prompt in prompts])):
        rows = mixing(policy, prompts, contrast_alpha=(h,), mix=mix)
        plain = asked.generate(policy, shown)
        assert said(rows) == said(plain)
        for row, other in zip(rows, plain, strict=True):
            torch.testing.assert_close(row.notes["logp"], other.notes["logp"], rtol=0, atol=1e-5)
    assert said(asked.generate(policy, prompts)) != said(asked.generate(policy, shown))


@pytest.mark.parametrize(("h", "calls"), [(0.0, 1), (1.0, 1), (0.5, 2)])
def test_a_branch_that_nobody_needs_is_not_read(policy, h, calls):
    seen = []
    hook = policy.core.register_forward_pre_hook(lambda *inputs: seen.append(1))
    mixing(policy, pictures(), contrast_alpha=(h,), length=3)
    hook.remove()
    assert len(seen) == calls * (1 + 3)  # the prompts, and three tokens


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_families_that_count_positions_in_images_keep_their_branches_apart(exact, family):
    """Their models hold offsets from one call to the next, which two branches must not share."""
    policy, prompts = exact(family), asked.prompts(family)
    for h, shown in ((0.0, prompts), (1.0, [without_media(prompt) for prompt in prompts])):
        assert said(mixing(policy, prompts, contrast_alpha=(h,))) == said(asked.generate(policy, shown))
    together = mixing(policy, prompts, contrast_alpha=(0.5,))
    apart = mixing(policy, prompts, contrast_alpha=(0.5,), generate={"batch_size": 1})
    assert said(together) == said(apart)
    for row, other in zip(together, apart, strict=True):
        torch.testing.assert_close(row.notes["logp"], other.notes["logp"], rtol=0, atol=1e-5)
    row = together[1]
    halves = [
        asked.plainly(
            policy, replace(row, steps=replace(row.steps, prompt=policy.prompt_encoder.encode(prompt)))
        )
        for prompt in (row.prompt, without_media(row.prompt))
    ]
    out = torch.tensor(policy.prompt_encoder.placeholders)
    seen, unseen = (half.index_fill(-1, out, FORBIDDEN).log_softmax(-1) for half in halves)
    logp = mixed(seen, unseen, torch.full((row.length, 1), 0.5), "log").log_softmax(-1)
    logp = logp.gather(1, row.steps.ids[:, None])[:, 0].float()
    torch.testing.assert_close(row.notes["logp"], logp, rtol=0, atol=2e-5)


def test_a_prompt_without_images_has_two_equal_branches(policy):
    words = [tiny.ask("words", "the quick fox")]
    assert said(mixing(policy, words)) == said(asked.generate(policy, words))


# ---- batches


def test_rows_of_different_ratios_share_a_batch_and_change_nothing(policy, monkeypatch):
    monkeypatch.setattr(policy.prompt_encoder, "end", [policy.prompt_encoder.end[0], *range(0, 256, 8)])
    prompts = [prompt for prompt in [*pictures(), tiny.ask("words", "what")] for _ in range(6)]
    options = {"contrast_alpha": (0.0, 0.4, 1.0), "length": 12}
    sizes = []
    hook = policy.core.register_forward_pre_hook(
        lambda module, inputs, named: sizes.append(len(named["input_ids"])), with_kwargs=True
    )
    together = mixing(policy, prompts, **options)
    hook.remove()
    # Six rows are plain, six blind, six both: each branch begins with twelve of eighteen.
    assert sizes[:2] == [3, 3] and sizes[2:4] == [12, 12] and sizes[-1] < 6
    apart = mixing(policy, prompts, generate={"batch_size": 1}, **options)
    assert said(together) == said(apart)
    for row, other in zip(together, apart, strict=True):
        for name in ("logp", "entropy"):
            torch.testing.assert_close(row.notes[name], other.notes[name], rtol=0, atol=1e-5)


def test_answers_tell_their_ratio_and_are_learned_from_as_usual(policy):
    rows = mixing(policy, pictures(1) * 4, contrast_alpha=(0.0, 0.5))
    answers = [row.outcomes[-1] for row in rows]
    assert [answer.recorded["contrast_alpha"] for answer in answers] == [0.0, 0.5, 0.0, 0.5]
    assert [answer.tags["dial"] for answer in answers] == ["0", "1", "0", "1"]
    assert [row.on_policy for row in rows] == [True, False, True, False]
    batch = policy.collate(rows)
    with torch.no_grad():
        logp = policy(batch).logp
    wanted = plainly(policy, rows[1].prompt, rows[1].steps.ids).log_softmax(-1)
    wanted = wanted.gather(1, rows[1].steps.ids[:, None])[:, 0]  # with the image, whatever drew them
    torch.testing.assert_close(logp[1, : rows[1].length].float(), wanted, rtol=0, atol=2e-5)


# ---- draws


def dial(**options):
    class Engine:
        policy = None

    return ContrastiveDecoding(Engine(), stream=options.pop("stream", Stream(0)), **options)


def test_ratios_are_drawn_for_every_answer_and_stay_in_bounds():
    engine = dial(contrast_alpha=(0.6,), contrast_alpha_std=(0.15,))
    drawn = torch.tensor([engine.ratio(f"p{i}", k) for i in range(500) for k in range(2)])
    assert abs(drawn.mean() - 0.6) < 0.02 and abs(drawn.std() - 0.15) < 0.02
    assert len(drawn.unique()) > 900
    wide = torch.tensor(
        [dial(contrast_alpha=(0.5,), contrast_alpha_std=(2.0,)).ratio(f"p{i}", 0) for i in range(50)]
    )
    assert set(wide.tolist()) > {0.0, 1.0} and wide.min() == 0 and wide.max() == 1
    low = [dial(contrast_alpha=(-0.5,), contrast_alpha_std=(2.0,)).ratio(f"p{i}", 0) for i in range(50)]
    assert max(low) == 0 and min(low) < -1


def test_draws_depend_on_seed_step_prompt_and_turn_alone():
    def three(engine):
        return [engine.ratio("a", 0), engine.ratio("a", 1), engine.ratio("b", 0)]

    stream = Stream(0)
    first = three(dial(stream=stream))
    assert three(dial(stream=stream)) == first and len(set(first)) == 3
    assert three(dial(stream=Stream(1)))[0] != first[0]
    stream.step = 1
    assert three(dial(stream=stream))[0] != first[0]


def test_the_ratios_of_a_pair_keep_their_distance():
    engine = dial(contrast_alpha=(0.4, 0.6), contrast_alpha_std=(0.1, 0.1), gap=0.1)
    pairs = [(engine.ratio(f"p{i}", 2), engine.ratio(f"p{i}", 3)) for i in range(200)]
    assert min(b - a for a, b in pairs) >= 0.1
    # drawn anew, not pushed: few stand at the least distance
    assert sum(abs(b - a - 0.1) < 1e-9 for a, b in pairs) < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contrast_alpha": (0.1, 0.2)}, "must list as many numbers"),
        ({"contrast_alpha": (0.5, 0.1), "contrast_alpha_std": (0.0, 0.0)}, "must rise by the `gap`"),
        ({"contrast_alpha": (-0.5,), "mix": "prob"}, "cannot be negative"),
    ],
)
def test_contradictory_ratios_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dial(**options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("contrastive_decoding", {"plausibility_threshold": 2.0}),
        ("contrastive_decoding", {"contrast_alpha": [1.2]}),
        ("dropout_ntp", {"share": 1.0}),
    ],
)
def test_options_outside_their_range_are_configuration_errors(name, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Pieces(Stream(0)).check("engine", Piece(f"vision.{name}", options))


# ---- contrastive decoding


def test_vcd_never_draws_what_the_image_makes_implausible(policy):
    options = {"contrast_alpha": (-0.5,), "against": "noised", "plausibility_threshold": 0.1}
    rows = mixing(policy, pictures(), **options, generate={"temperature": 3.0})
    for row in rows:
        seen = plainly(policy, row.prompt, row.steps.ids).log_softmax(-1)
        taken = seen.gather(1, row.steps.ids[:, None])[:, 0]
        assert (taken >= seen.max(-1).values + math.log(0.1) - 1e-4).all()
    free = mixing(
        policy, pictures(), **{**options, "plausibility_threshold": 0.0}, generate={"temperature": 3.0}
    )
    assert said(free) != said(rows)


def test_m3id_leaves_the_first_token_alone_and_the_sure_ones(policy):
    prompts = pictures()
    plain = asked.generate(policy, prompts, max_completion_length=1)
    grown = mixing(policy, prompts, contrast_alpha=(-1.0,), decay_gamma=0.5, length=1)
    torch.testing.assert_close(plain[0].notes["entropy"], grown[0].notes["entropy"], rtol=0, atol=1e-5)
    # no token of a random model has a tenth of the probability: nothing is sure, everything is mixed
    for threshold, same in ((1e-6, True), (0.9, False)):
        rows = mixing(
            policy, prompts, contrast_alpha=(-1.0,), decay_gamma=0.5, confidence_threshold=threshold, length=8
        )
        near = all(
            torch.allclose(row.notes["entropy"], other.notes["entropy"], atol=1e-5)
            for row, other in zip(rows, asked.generate(policy, prompts), strict=True)
        )
        assert near is same


def test_the_ratio_of_m3id_is_exp_gamma_t_less_1(policy):
    # token 2: h = -(e^(.5 * 2) - 1)
    (row,) = mixing(policy, pictures(1), contrast_alpha=(-1.0,), decay_gamma=0.5, length=4)
    halves = [
        plainly(policy, p, row.steps.ids).log_softmax(-1) for p in (row.prompt, without_media(row.prompt))
    ]
    h = torch.tensor([[1 - math.exp(0.5 * t)] for t in range(row.length)])
    logp = mixed(*halves, h, "log").log_softmax(-1).gather(1, row.steps.ids[:, None])[:, 0]
    torch.testing.assert_close(row.notes["logp"], logp, rtol=0, atol=1e-4)


def test_a_ratio_that_grew_very_large_is_finite(policy):
    (row,) = mixing(policy, pictures(1), contrast_alpha=(-1.0,), decay_gamma=50.0, length=4)
    assert row.notes["logp"].isfinite().all() and row.notes["entropy"].isfinite().all()
    assert not set(row.steps.ids.tolist()) & set(policy.prompt_encoder.placeholders)


def test_a_mixture_is_drawn_like_any_other_distribution(policy):
    (row,) = mixing(policy, pictures(1), contrast_alpha=(0.5,), length=1)
    halves = [
        plainly(policy, p, row.steps.ids).log_softmax(-1) for p in (row.prompt, without_media(row.prompt))
    ]
    uniform = torch.rand(1, generator=Stream(0).generator("p0", 0))
    token, _, _ = draw_tokens(mixed(*halves, torch.full((1, 1), 0.5), "log"), uniform)
    assert token.tolist() == row.steps.ids.tolist()
