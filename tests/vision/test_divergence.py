"""Divergences from a teacher by hand, and as TRL's trainers compute them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmrl.config.registry import Needs
from mmrl.training.loop import evaluate_references
from mmrl.vision.decoding import step_model
from mmrl.vision.decoding.divergence import (
    Taught,
    generalized_jsd,
    over_spans,
    over_support,
    over_vocabulary,
)
from mmrl.vision.decoding.inner_outputs import OF_LOGITS
from mmrl.vision.decoding.step_model import chunked_logp
from mmrl.vision.references.teacher import Teacher
from tests.vision.test_tokens import loaded, recorded, shaken

FAMILY = "qwen2_5_vl"
BETAS = [0.0, 0.1, 0.5, 1.0]


def teaching(beta=1.0, head=None, tail=True, **options):
    return SimpleNamespace(
        beta=beta, head=head, loss_add_tail=tail, align=False, span_temperature=1.0, **options
    )


def logits(rows, size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=generator, dtype=torch.float64) * 2


# ---- by hand


def test_three_divergences_of_two_tokens_by_hand():
    p, q = torch.tensor([0.75, 0.25]).double(), torch.tensor([0.5, 0.5]).double()
    found = [float(generalized_jsd(p.log(), q.log(), beta)) for beta in (0.0, 1.0, 0.5)]
    forward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    reverse = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    m = (0.625, 0.375)
    half = [
        sum(a * math.log(a / b) for a, b in zip(one, m, strict=True)) for one in ((0.75, 0.25), (0.5, 0.5))
    ]
    assert found == pytest.approx([forward, reverse, sum(half) / 2])


def test_the_reverse_kl_by_hand_and_its_gradient():
    own = torch.tensor([[0.3, -1.2, 0.5]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.5, 0.25, 0.25, 9.0]], dtype=torch.float64).log()  # the last is padding
    (found,) = over_vocabulary(teaching(), own, teacher)
    p, q = own.softmax(-1)[0], torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert float(found.detach()) == pytest.approx(float((p * (p / q).log()).sum().detach()))
    (slope,) = torch.autograd.grad(found, own)
    # d KL / d logit_j = p_j (log p_j / q_j - KL)
    torch.testing.assert_close(slope[0], (p * ((p / q).log() - found)).detach())


def test_likely_tokens_and_a_tail_by_hand():
    # Four tokens; the teacher names token 0, and token 2 was sampled. The tail is tokens 1 and 3.
    p, q = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).double(), (0.7, 0.05, 0.05, 0.2)
    columns = {
        "top_k_ids": torch.tensor([[0]]),
        "top_k_logp": torch.tensor([[math.log(q[0])]]).double(),
        "logp": torch.tensor([math.log(q[2])]).double(),
    }
    (found,) = over_support(teaching(1.0), p.log(), torch.tensor([2]), [], columns)
    pairs = ((0.4, 0.7), (0.2, 0.05), (0.4, 0.25))
    assert float(found) == pytest.approx(sum(a * math.log(a / b) for a, b in pairs))
    (found,) = over_support(teaching(0.0), p.log(), torch.tensor([2]), [], columns)
    assert float(found) == pytest.approx(0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.3 / 0.6))
    # A token that the policy cannot sample belongs to the tail: everything does.
    (found,) = over_support(teaching(0.0), p.log(), torch.tensor([2]), [0], columns)
    assert float(found) == pytest.approx(0.0, abs=1e-9)
    (found,) = over_support(teaching(1.0, tail=False), p.log(), torch.tensor([2]), [], columns)
    pairs = ((0.4 / 0.6, 0.7 / 0.75), (0.2 / 0.6, 0.05 / 0.75))
    assert float(found) == pytest.approx(sum(a * math.log(a / b) for a, b in pairs))


def test_all_likely_tokens_are_the_vocabulary():
    own, other = logits(5, 7, 0), logits(5, 7, 1)
    best = other.log_softmax(-1).sort(descending=True)
    ids = torch.tensor([0, 1, 2, 3, 4])
    columns = {"top_k_ids": best.indices, "top_k_logp": best.values, "logp": other.log_softmax(-1)[:, 0]}
    for beta in BETAS:
        whole = over_vocabulary(teaching(beta), own, other)
        found = over_support(teaching(beta, tail=False), own, ids, [], columns)
        torch.testing.assert_close(found, whole)
        assert (whole > 0).all()
        # Merging tokens into a tail can only lower a divergence.
        fewer = {**columns, "top_k_ids": best.indices[:, :3], "top_k_logp": best.values[:, :3]}
        fewer["logp"] = other.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        assert (over_support(teaching(beta), own, ids, [], fewer) <= whole + 1e-12).all()


def test_spans_of_text_by_hand():
    # Three tokens in two spans: log 0.5 + log 0.4 against log 0.3, and log 0.9 against log 0.6.
    logp = torch.tensor([[0.5, 0.4, 0.9, 1.0]]).double().log().requires_grad_()
    span, other = torch.tensor([[1, 1, 2, 0]]), torch.tensor([[0.3, 0.3, 0.6, 1.0]]).double().log()
    found = over_spans(teaching(1.0), logp, span, other)
    two = lambda p, q: p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert found.tolist() == [[0.0, pytest.approx(two(0.2, 0.3)), pytest.approx(two(0.9, 0.6)), 0.0]]
    (slope,) = torch.autograd.grad(found.sum(), logp)
    # d KL / d log p = p (log p / q - log (1 - p) / (1 - q)), for both tokens of the span
    each = lambda p, q: p * (math.log(p / q) - math.log((1 - p) / (1 - q)))
    assert slope[0].tolist() == pytest.approx([each(0.2, 0.3)] * 2 + [each(0.9, 0.6), 0.0])
    cold = SimpleNamespace(**{**vars(teaching(0.0)), "span_temperature": 2.0})
    found = over_spans(cold, logp.detach(), span, other)
    assert float(found[0, 1]) == pytest.approx(two(0.3**0.5, 0.2**0.5))


# ---- TRL


@pytest.mark.parametrize("beta", BETAS)
def test_the_vocabulary_is_compared_as_in_trl(beta):
    trl = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    own, other = logits(6, 11, 0).requires_grad_(), logits(6, 11, 1)
    found = over_vocabulary(teaching(beta), own, other)
    wanted = trl._jsd_divergence(own.log_softmax(-1), other.log_softmax(-1), beta).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(value.sum(), own)[0] for value in (found, wanted)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)


def trl_server_loss(beta, tail, own, ids, other, top_k):
    """Compute the loss of TRL's ServerDistillationTrainer for one row of tokens, each as a row."""
    trl = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    kind = trl.ServerDistillationTrainer
    trainer = SimpleNamespace(
        beta=beta, loss_add_tail=tail, reverse_kl_top_1_mode="sampled",
        _reduce_divergence_loss=kind._reduce_divergence_loss,
    )  # fmt: skip
    for name in ("_get_reverse_kl_top_1_tokens", "_compute_sparse_top_1_divergence_loss"):
        setattr(trainer, name, getattr(kind, name).__get__(trainer))
    best = other.topk(max(1, top_k))
    told = {
        "topk_logprobs": best.values[:, None],
        "topk_token_ids": best.indices[:, None],
        "actual_logprobs": other.gather(-1, ids[:, None]),
    }
    options = {"teacher_result": told, "student_log_probs": own[:, None], "labels": ids[:, None]}
    if beta == 0:
        return kind._compute_server_forward_kl_loss(trainer, **options)
    options["completion_tokens"] = ids[:, None]
    return kind._compute_server_sparse_top_1_divergence_loss(trainer, **options)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(("beta", "theirs", "top_k"), [(0.0, 4, 4), (0.3, 1, 1), (0.5, 1, 1), (1.0, 1, 0)])
def test_likely_tokens_are_compared_as_by_the_server_trainer_of_trl(beta, theirs, top_k, tail):
    # With beta 1 TRL compares the sampled token alone, which is `loss_top_k: 0` here.
    own, other = logits(6, 11, 0).requires_grad_(), logits(6, 11, 1).log_softmax(-1)
    ids = torch.tensor([0, 3, 5, int(other[3].argmax()), 9, 10])
    best = other.topk(top_k)
    columns = {
        "top_k_ids": best.indices,
        "top_k_logp": best.values,
        "logp": other.gather(-1, ids[:, None])[:, 0],
    }
    found = over_support(teaching(beta, tail=tail), own, ids, [], columns).mean()
    wanted = trl_server_loss(beta, tail, own.log_softmax(-1), ids, other, theirs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    if found.requires_grad and wanted.requires_grad:
        slopes = [torch.autograd.grad(value, own)[0] for value in (found, wanted)]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_small_model_is_compared_with_its_teacher_as_by_the_trainer_of_trl(
    checkpoint, teacher_folder, beta, dtype
):
    trl = pytest.importorskip("trl.trainer.distillation_trainer")
    learner = loaded(checkpoint, dtype=dtype)
    teacher = Teacher(learner, model=str(teacher_folder), dtype=dtype, beta=beta)
    learner.module.forbidden = []  # TRL forbids no placeholders
    needs = Needs(others={"teacher": frozenset({"hidden"})})
    batch = evaluate_references({"teacher": teacher}, recorded(learner, FAMILY), needs, 10**6)
    output = learner(batch, frozenset({"divergence", "hidden"}))
    found = (output.extra["divergence"] * batch.mask).sum() / batch.mask.sum()
    heads = [model.get_output_embeddings().weight for model in (learner.model, teacher.module.model)]
    states = output.extra["hidden"], batch.others["teacher"].extra["hidden"]
    # TRL computes logits in float32, whatever the weights are.
    wanted, _, _ = trl._chunked_divergence_loss(*states, *heads, batch.mask, beta)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=1e-6) and found > 1e-4


# ---- on a small model


@pytest.fixture(scope="module")
def teacher_folder(checkpoint, tmp_path_factory):
    """Save a model with other weights."""
    folder = tmp_path_factory.mktemp("teacher")
    shaken(loaded(checkpoint)).save(folder)
    return folder


def test_chunks_say_the_same_and_learn_the_same_from_two_teachers(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    head, other = nn.Linear(8, 50).double(), nn.Linear(6, 52).double()
    ids = torch.randint(0, 40, (23,), generator=generator)
    teachers = [teaching(1.0, other), teaching(0.5)]
    columns = {
        "teacher": torch.arange(23) % 2,
        "hidden": torch.randn(23, 9, generator=generator, dtype=torch.float64),  # padded
        "top_k_ids": torch.randint(0, 40, (23, 3), generator=generator),
        "top_k_logp": torch.full((23, 3), -1.5).double(),
        "logp": torch.full((23,), -2.0).double(),
    }
    heat, sizes, results = torch.linspace(0.5, 2, 23, dtype=torch.float64), [], []
    for module in (head, other):
        module.register_forward_hook(lambda module, inputs, output: sizes.append(output.numel()))
    for limit in (1 << 20, 4 * 102 * 4):
        monkeypatch.setattr(step_model, "LOGIT_BYTES", limit)
        sizes.clear()
        hidden = torch.randn(23, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        hidden.requires_grad_()
        out = chunked_logp(hidden, head, ids, heat, [41, 49], OF_LOGITS, taught=Taught(teachers, columns))
        (out["logp"] + out["divergence"] * heat).sum().backward()
        results.append([*(out[name].detach() for name in sorted(out)), hidden.grad])
        # Logits of both at one time: 4 rows of 50 and of 52.
        assert max(sizes) <= (4 * 52 if limit < 1 << 20 else 23 * 52)
        assert set(out) == OF_LOGITS | {"logp"} and (out["divergence"] > 0).all()
        assert all(parameter.grad is None for parameter in other.parameters())
    for value, wanted in zip(*results, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "loss_top_k": 3}, {"beta": 0.0, "align": True}])
def test_distillation_pulls_the_learner_to_its_teacher(checkpoint, teacher_folder, options):
    learner = loaded(checkpoint, lora_rank=2)
    before = len(list(learner.module.parameters()))
    teacher = Teacher(learner, model=str(teacher_folder), dtype="float32", **options)
    assert len(list(learner.module.parameters())) == before, "the teacher is no part of what learns"
    needs = Needs(others={"teacher": frozenset({"hidden"})})
    batch = evaluate_references({"teacher": teacher}, recorded(learner, FAMILY), needs, 10**6)
    optimizer = torch.optim.Adam([p for p in learner.module.parameters() if p.requires_grad], lr=0.02)
    found = []
    for _ in range(8):
        output = learner(batch, frozenset({"divergence"}))
        loss = (output.extra["divergence"] * batch.mask).sum() / batch.mask.sum()
        found.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0 < found[-1] < 0.5 * found[0]


def test_what_other_teachers_leave_in_columns_of_spans_is_not_read():
    columns = {
        "teacher": torch.tensor([[0, 0], [1, 1]]),
        "logp": torch.zeros(2, 2),
        "span": torch.tensor([[1, 1], [7, -5]]),
        "span_logp": torch.tensor([[-2.0, -2.0], [math.nan, math.inf]]),
    }
    spans = teaching()
    spans.align = True
    logp = torch.tensor([[-1.0, -0.5], [-0.3, -0.2]], requires_grad=True)
    values = Taught([spans, teaching()], columns).with_spans(torch.zeros(2, 2), logp)
    values.sum().backward()
    assert values[0, 1] > 0 and not values[1].any()
    assert logp.grad[0].all() and not logp.grad[1].any()


def test_without_a_teacher_there_is_nothing_to_compare_with(checkpoint):
    policy = loaded(checkpoint)
    with pytest.raises(ValueError, match="`distillation` compares with one teacher"):
        policy(recorded(policy, FAMILY), frozenset({"divergence"}))
