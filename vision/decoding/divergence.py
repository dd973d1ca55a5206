"""Divergences of a policy from a teacher, over the vocabulary, over likely tokens, or over text spans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mmrl.core.step_table import StepOutput
from mmrl.runtime.output_head import OutputHead
from mmrl.vision.decoding.token_steps import FORBIDDEN

TAIL = 1e-7  # lower bound of the total probability of all tokens outside the support, as in TRL
LogitsOf = Callable[[OutputHead, Tensor, Tensor], Tensor]  # (head, states (m, W), rows (m,)) -> logits


class Teaching(Protocol):
    """The options of a teacher that define how its divergence from the policy is computed."""

    beta: float  # 0: forward KL, 1: reverse KL, between 0 and 1: generalised Jensen-Shannon divergence
    loss_add_tail: bool  # whether all tokens outside the support count as one more token
    span_temperature: float  # divides the log-probabilities of text spans
    head: OutputHead | None  # output head, if the whole vocabulary is compared
    align: bool  # whether text spans are compared, because the teacher has another tokenizer


@dataclass(frozen=True, eq=False)
class Taught:
    """Outputs of one or several teachers, as columns (N, T, ...) of N rows, or (M, ...) of M steps.

    "teacher" is the index of each step's teacher in `teachers`, and "logp" its log-probability. Other columns
    depend on what is compared. Whole vocabulary: "hidden", the states before `head`. Likely tokens:
    "top_k_ids" (-1: none) and "top_k_logp". Text spans: "span", numbered from 1, and "span_logp".
    """

    teachers: Sequence[Teaching]
    columns: Mapping[str, Tensor]

    @staticmethod
    def of(others: Mapping[str, StepOutput], teachers: Sequence[Teaching]) -> Taught:
        """Find the reference that provides teacher outputs; raise ValueError unless there is exactly one."""
        outputs = {name: other for name, other in others.items() if "teacher" in other.extra}
        if len(outputs) != 1:
            raise ValueError(
                "the penalty `distillation` compares with one teacher, as `references: {teacher: {name: "
                f"vision.teacher, model: ...}}}}`; it got {', '.join(sorted(outputs)) or 'none'}. Against "
                "the policy's own earlier weights take the penalty `k2`"
            )
        (output,) = outputs.values()
        return Taught(teachers, {"logp": output.logp, **output.extra})

    def __getitem__(self, where: Any) -> Taught:
        return Taught(self.teachers, {name: column[where] for name, column in self.columns.items()})

    @property
    def heads(self) -> list[OutputHead]:
        """Output heads of the teachers that are compared over the whole vocabulary."""
        return [teacher.head for teacher in self.teachers if teacher.head is not None]

    def divergence(self, logits: Tensor, ids: Tensor, forbidden: Sequence[int], read: LogitsOf) -> Tensor:
        """Compute the divergence (M,) at M tokens from the policy's logits (M, V); 0 if spans are compared.

        `read` computes a teacher's logits with the policy's temperatures and forbidden tokens.
        """
        values = logits.new_zeros(len(ids))
        for number, teacher in enumerate(self.teachers):
            (rows,) = (self.columns["teacher"] == number).nonzero(as_tuple=True)
            if not len(rows) or teacher.align:
                continue
            mine = {name: column[rows] for name, column in self.columns.items()}
            if teacher.head is not None:
                states = mine["hidden"][:, : teacher.head.weight.shape[1]]  # unpad: widths of teachers differ
                value = over_vocabulary(teacher, logits[rows], read(teacher.head, states, rows))
            else:
                value = over_support(teacher, logits[rows], ids[rows], forbidden, mine)
            values = values.index_put((rows,), value)
        return values

    def with_spans(self, values: Tensor, logp: Tensor) -> Tensor:
        """Add span divergences to `values` (N, T), at the last token of each span; `logp` is the policy's."""
        for number, teacher in enumerate(self.teachers):
            if teacher.align and (mine := self.columns["teacher"] == number).any():
                # Replace NaN by 0: rows of other teachers may hold NaN in these columns.
                span, span_logp = self.columns["span"] * mine, self.columns["span_logp"].where(mine, 0.0)
                values = values + over_spans(teacher, logp, span, span_logp)
        return values


def generalized_jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Compute the divergence (...) of policy p from teacher q, in nats, from log-probabilities (..., K).

    beta 0 is the forward KL(q || p), beta 1 the reverse KL(p || q). Between them it is beta KL(q || m) +
    (1 - beta) KL(p || m) with the mixture m = (1 - beta) p + beta q (arXiv 2306.13649).
    """
    if beta in (0, 1):
        log_m = log_q if beta else log_p
    else:
        log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    value = log_p.new_zeros(log_p.shape[:-1])
    if beta < 1:
        value = value + (beta or 1.0) * (log_q.exp() * (log_q - log_m)).sum(-1)
    if beta > 0:
        value = value + ((1 - beta) or 1.0) * (log_p.exp() * (log_p - log_m)).sum(-1)
    return value


def on_support(teacher: Teaching, log_p: Tensor, log_q: Tensor, inside: Tensor, tail: bool) -> Tensor:
    """Compute the divergence (...) from log-probabilities (..., K) of the tokens in the mask `inside`.

    With `tail`, all other tokens count as one more token; otherwise both distributions are renormalised.
    """
    both = [logp.masked_fill(~inside, FORBIDDEN) for logp in (log_p, log_q)]
    total = [logp.logsumexp(-1, keepdim=True) for logp in both]
    if tail:
        rest = [(-part.clamp(max=-TAIL).expm1()).log() for part in total]
        both = [torch.cat(pair, -1) for pair in zip(both, rest, strict=True)]
    else:
        both = [logp - part for logp, part in zip(both, total, strict=True)]
    return generalized_jsd(*both, teacher.beta)


def over_vocabulary(teacher: Teaching, logits: Tensor, other: Tensor) -> Tensor:
    """Compute the divergence (m,) from logits (m, V) of the policy and (m, V') of the teacher."""
    # Cut to the smaller vocabulary: models of one family pad their heads to different sizes.
    size = min(logits.shape[-1], other.shape[-1])
    both = (logits[:, :size].log_softmax(-1), other[:, :size].to(logits.dtype).log_softmax(-1))
    return generalized_jsd(*both, teacher.beta)


def over_support(
    teacher: Teaching, logits: Tensor, ids: Tensor, forbidden: Sequence[int], columns: Mapping[str, Tensor]
) -> Tensor:
    """Compute the divergence (m,) on the teacher's likely tokens and, if beta > 0, the sampled token.

    The result equals that of TRL's ServerDistillationTrainer for beta 0, and for any beta if one likely token
    is compared. Tokens that the policy cannot sample (`forbidden`) count as other tokens.
    """
    support, log_q = columns["top_k_ids"].long(), columns["top_k_logp"].to(logits.dtype)
    inside = (support >= 0) & ~torch.isin(support, support.new_tensor(forbidden))
    if teacher.beta > 0:
        inside = torch.cat([inside, ~(support == ids[:, None]).any(-1, keepdim=True)], -1)
        support = torch.cat([support, ids[:, None]], -1)
        log_q = torch.cat([log_q, columns["logp"][:, None].to(log_q.dtype)], -1)
    log_p = logits.gather(-1, support.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    return on_support(teacher, log_p, log_q, inside, teacher.loss_add_tail)


def over_spans(teacher: Teaching, logp: Tensor, span: Tensor, span_logp: Tensor) -> Tensor:
    """Compute each text span's binary divergence (this text or another), (N, T) at its last token.

    The log-probability of a span is summed over its tokens and divided by `span_temperature`. This is the
    binarised divergence of approximate likelihood matching (ALM, arXiv 2503.20083).

    Args:
        teacher: Its options `beta` and `span_temperature` are used.
        logp: (N, T) log-probabilities of the policy's tokens.
        span: (N, T) number of the span that contains each token, from 1; 0: no span.
        span_logp: (N, T) the teacher's log-probability of the span that contains each token.
    """
    sums = logp.new_zeros(len(logp), int(span.max()) + 1).scatter_add(1, span, logp)
    log_p, log_q = (
        value[..., None] / teacher.span_temperature
        for value in (sums.gather(1, span), span_logp.to(logp.dtype))
    )
    value = on_support(teacher, log_p, log_q, torch.ones_like(log_p, dtype=torch.bool), tail=True)
    after = torch.cat([span[:, 1:], torch.zeros_like(span[:, :1])], 1)
    return torch.where((span > 0) & (span != after), value, 0.0)
