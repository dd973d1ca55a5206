"""Real vLLM servers as teachers: `MMRL_VLLM` names an environment that `make vllm` made."""

from __future__ import annotations

import os

import pytest

from mmrl.config.loading import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.vision.engines.generate import Generate
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.references.served_teacher import ServedTeacher
from mmrl.vision.references.teacher import Teacher
from tests.vision.test_tokens import shaken
from tests.vision.test_vllm_servers import PROMPTS, model, serving, talks  # noqa: F401

HOME = os.environ.get("MMRL_VLLM", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not HOME, reason="MMRL_VLLM names no environment with vLLM"),
]
HIDDEN = frozenset({"hidden"})


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):  # noqa: F811
    """Save a teacher with other weights than the policy."""
    folder = tmp_path_factory.mktemp("teacher")
    shaken(Tokens(model=str(model), dtype="float32", freeze_vision_tower=False)).save(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    with serving(folder, {}, 1, tmp_path_factory.mktemp("logs")) as (urls, _):
        yield urls[0]


def rows(policy):
    encoded = [policy.encode(prompt, Outcome(text="0 to 12, or 7.")) for prompt in PROMPTS.values()]
    return policy.collate(encoded)


def served(policy, folder, url, **options):
    options = {"loss_top_k": 5, "served_model_name": "policy", **options}
    return ServedTeacher(policy, model=str(folder), servers=(url,), **options)


def test_a_server_tells_what_the_teacher_in_this_process_says(model, folder, url):  # noqa: F811
    policy = Tokens(model=str(model), dtype="float32")
    batch, inside = rows(policy), rows(policy).mask > 0
    local = Teacher(policy, model=str(folder), dtype="float32", loss_top_k=5)
    local.module.forbidden = []  # prompts are scored without a bias on placeholders
    found, wanted = (teacher(batch, HIDDEN) for teacher in (served(policy, folder, url), local))
    gaps = {
        kind: float((found.logp - wanted.logp)[row][inside[row]].abs().max())
        for row, kind in enumerate(PROMPTS)
    }
    print("largest |dlogp| of tokens:", {kind: f"{value:.1e}" for kind, value in gaps.items()})
    assert max(gaps.values()) < 1e-4
    likely = (found.extra["top_k_logp"] - wanted.extra["top_k_logp"])[inside].abs()
    same = (found.extra["top_k_ids"] == wanted.extra["top_k_ids"])[inside].float().mean()
    print(f"likely tokens: the same {float(same):.3f}, largest |dlogp| {float(likely.max()):.1e}")
    assert likely.max() < 1e-4 and same > 0.95
    for beta in (0.0, 0.5, 1.0):
        losses = []
        for teacher, output in zip((served(policy, folder, url), local), (found, wanted), strict=True):
            teacher.beta = policy.teachers[int(output.extra["teacher"][0, 0])].beta = beta
            said = policy(batch.replace(others={"teacher": output}), frozenset({"divergence"}))
            losses.append(float((said.extra["divergence"] * batch.mask).sum().detach()))
        print(f"beta {beta}: served {losses[0]:.6f}, in process {losses[1]:.6f}")
        assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] > 0


def test_spans_of_text_of_a_server(model, folder, url):  # noqa: F811
    policy = Tokens(model=str(model), dtype="float32")
    batch = rows(policy)
    local = Teacher(policy, model=str(folder), dtype="float32", align=True)
    local.module.forbidden = []
    found, wanted = (one(batch, HIDDEN) for one in (served(policy, folder, url, align=True), local))
    assert found.extra["span"].equal(wanted.extra["span"])
    gap = (found.extra["span_logp"] - wanted.extra["span_logp"]).abs().max()
    print(f"largest |dlogp| of spans: {float(gap):.1e}")
    assert gap < 1e-4


def test_what_a_server_does_not_give_is_an_error(model, folder, url):  # noqa: F811
    policy = Tokens(model=str(model), dtype="float32")
    teacher = served(policy, folder, url)
    assert len(teacher.servers.checksum) == 64, "it tells the hash of its weights"
    with pytest.raises(ConfigError, match="has weights of the checksum"):
        served(policy, folder, url, checksum="abc")
    with pytest.raises(ConfigError, match=r"serves \['policy'\], not the teacher"):
        served(policy, folder, url, served_model_name="teacher")
    with pytest.raises(ConfigError, match="tells no log-probabilities .*max allowed: 20"):
        served(policy, folder, url, loss_top_k=21)


@pytest.mark.parametrize("most", [0, 1])
def test_conversations_with_images_in_replies(model, folder, url, most):  # noqa: F811
    policy = Tokens(model=str(model), dtype="float32")
    engine = Generate(policy, stream=Stream(3), max_completion_length=16)
    batch = policy.collate(talks(engine, most))
    assert all(batch.steps.suffixes)
    local = Teacher(policy, model=str(folder), dtype="float32", loss_top_k=5)
    local.module.forbidden = []
    inside = batch.mask > 0
    found, wanted = (one(batch, HIDDEN) for one in (served(policy, folder, url), local))
    gap = float((found.logp - wanted.logp)[inside].abs().max())
    print(f"largest |dlogp| of {int(inside.sum())} tokens in conversations: {gap:.1e}")
    assert gap < 1e-4
