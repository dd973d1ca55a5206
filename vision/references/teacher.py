"""Teachers: other, frozen vision-language models whose distributions the policy learns from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.config.engine_checks import makes
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt, PositiveFloat, Probability
from mmrl.config.registry import reference
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import pad_to
from mmrl.runtime.output_head import OutputHead
from mmrl.vision.decoding.text_spans import SharedSpans, Translator
from mmrl.vision.decoding.token_steps import TokenSteps
from mmrl.vision.models import loading
from mmrl.vision.models.processor import PromptEncoder

log = logging.getLogger("mmrl")
TOP_K = ("top_k_ids", "top_k_logp")


class FrozenTeacher:
    """Base class of teachers: options of the divergence, and conversion of rows to the teacher's tokens.

    Raises ValueError if the teacher's vocabulary differs from the policy's, unless `align`.

    Args:
        policy: The policy, `vision.tokens`.
        model: Hub id or folder of the teacher.
        beta: Divergence of the penalty `distillation`.
        loss_top_k: Number of likely tokens that are compared; 0: the whole vocabulary.
        loss_add_tail: Whether all other tokens count as one more token.
        align: Whether spans of text are compared.
        span_temperature: Divides log-probabilities of spans.
    """

    decay = 1.0  # fraction of the old weights that an update keeps; 1: all, the weights are fixed
    holds = "a model"  # what the reference adds to memory, for memory estimates
    head: OutputHead | None = None

    def __init__(
        self,
        policy: Any,
        model: str,
        *,
        beta: float,
        loss_top_k: int,
        loss_add_tail: bool,
        align: bool,
        span_temperature: float,
    ) -> None:
        self.beta, self.loss_top_k, self.loss_add_tail = beta, loss_top_k, loss_add_tail
        self.align, self.span_temperature = align, span_temperature
        self.encoder = loading.load_encoder(model)  # tokenizer and processor
        own_words = reads_own_words(model, self.encoder, policy.prompt_encoder, align)
        self.translate = Translator(policy.prompt_encoder, self.encoder, align) if own_words else None
        if not own_words:  # then prompts must fit both models
            limits = {self.encoder.limit, policy.prompt_encoder.limit} - {0}
            policy.prompt_encoder.limit = min(limits, default=0)
        self.policy, self.number = policy, len(policy.teachers)
        policy.teachers.append(self)

    @staticmethod
    def check_run(options: Mapping[str, Any], config: Any) -> None:
        """Raise `ValueError` if the teacher cannot read the policy's tokens; reads no weights."""
        own = config.policy.options
        if "model" not in own:
            raise ValueError(f"a teacher reads tokens, and the policy '{config.policy.name}' has none")
        if makes(config.policy, config.rollout.engine) == "images":
            raise ValueError("a teacher scores texts, and the engine writes images; leave it out")
        teacher, policy = (encoder_of(str(one["model"])) for one in (options, own))
        if teacher and policy:
            reads_own_words(str(options["model"]), teacher, policy, bool(options.get("align")))

    def read(self, batch: Batch) -> tuple[TokenSteps, SharedSpans | None]:
        """Return the teacher's inputs for a batch, and with `align` the shared text spans."""
        return self.translate(batch.steps) if self.translate else (batch.steps, None)

    def output_of(
        self, batch: Batch, values: Mapping[str, Tensor], spans: SharedSpans | None, *, compared: bool
    ) -> StepOutput:
        """Create the output from the teacher's values (N, T, ...), padded to the width of the batch.

        With spans, the log-probability of a span is divided equally among its tokens. `compared` adds the
        columns that the penalty `distillation` reads.
        """
        width, values = batch.mask.shape[1], dict(values)
        if spans is not None:
            total = spans.sums(values.pop("logp"))
            values = {"logp": total / spans.lengths().clamp(min=1).to(total.device)}
            values |= {"span": spans.own.to(total.device), "span_logp": total} if compared else {}
        if compared:
            values["teacher"] = torch.full_like(values["logp"], self.number, dtype=torch.int64)
        values = {name: pad_to(value, width, 1) for name, value in values.items()}
        return StepOutput(values.pop("logp"), values)

    def rollout_weights(self) -> AbstractContextManager:
        """Raise ConfigError, because engines sample from the policy's own model."""
        raise ConfigError(
            "'rollout.policy' names a teacher, which cannot sample: name a reference of the policy's own "
            "weights (`frozen`, `ema`), or record answers of the teacher and use the engine `offline`"
        )

    def snapshot(self) -> None:
        """Do nothing, because the weights are fixed."""

    def update(self) -> None:
        """Do nothing, because the weights are fixed."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because the weights are loaded from `model`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing, because the state is empty."""


def encoder_of(model: str) -> PromptEncoder | None:
    """Load the prompt encoder of a model; None if that fails, for example before it is downloaded."""
    try:
        return loading.load_encoder(model)
    except (ValueError, OSError, ImportError) as error:  # raised again when the teacher is built
        log.info("the tokens of '%s' are not read yet: %s", model, error)
        return None


def reads_own_words(model: str, encoder: PromptEncoder, policy: PromptEncoder, align: bool) -> bool:
    """Whether a teacher uses its own prompt template; ValueError for another vocabulary without `align`."""
    mine, own = encoder.tokenizer.get_vocab(), policy.tokenizer.get_vocab()
    if mine != own and not align:
        raise ValueError(
            f"the model '{model}' has another vocabulary ({len(mine)} tokens) than the policy ({len(own)} "
            "tokens); set `align: true` to compare spans of text, or name a model of the same family"
        )
    kinds: list[Any] = [encoder.core.config, policy.core.config]
    return align or kinds[0].model_type != kinds[1].model_type


@reference
class Teacher(FrozenTeacher):
    """Teacher of on-policy distillation: another, frozen vision-language model in this process.

    It computes log-probabilities of the policy's tokens. A teacher of another type reads prompts with its own
    template and image processor. Raises `ValueError` if its vocabulary differs and `align` is false. Every
    process holds the whole model.

    Args:
        model: Hub id or folder of the teacher.
        dtype: Precision of the weights and of the computation.
        attn_implementation: Attention of transformers, such as "sdpa", "eager" or "flash_attention_2".
        beta: Divergence of the penalty `distillation`, as in TRL's DistillationTrainer: 1 is the reverse KL,
            0 the forward KL, between them the generalised Jensen-Shannon divergence.
        loss_top_k: Number of the teacher's top tokens that are compared; with `beta` above 0 the sampled
            token is compared too. 0: the whole vocabulary.
        loss_add_tail: With `loss_top_k`, whether all other tokens count as one more token; else both
            distributions are normalised on the compared tokens.
        align: Compare text spans that end at a token boundary of both tokenizers, for a teacher with another
            tokenizer (ALM, arXiv 2503.20083).
        span_temperature: Divides log-probabilities of spans; larger values weigh unlikely spans more.
    """

    def __init__(
        self,
        policy: Any,  # `vision.tokens`
        *,
        model: str,
        dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16",
        attn_implementation: str = "sdpa",
        beta: Probability = 1.0,
        loss_top_k: NonNegativeInt = 0,
        loss_add_tail: bool = True,
        align: bool = False,
        span_temperature: PositiveFloat = 1.0,
    ) -> None:
        options = {"loss_top_k": loss_top_k, "loss_add_tail": loss_add_tail, "align": align}
        super().__init__(policy, model, beta=beta, span_temperature=span_temperature, **options)
        loaded = loading.load_model(model, dtype=dtype, attn_implementation=attn_implementation)
        device = next(policy.module.parameters()).device
        reading = policy.reading_with(loaded, dtype, forbidden=self.encoder.placeholders, top_k=loss_top_k)
        self.module: nn.Module = reading.to(device)
        self.head = None if loss_top_k or align else OutputHead(loaded)

    @staticmethod
    def check_folders(options: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the folder of the teacher lacks weights."""
        loading.check_folders(str(options.get("model", "")))

    @torch.no_grad()
    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        if self.align and (more := extra - {"hidden"}):
            raise ValueError(f"a teacher with `align` tells log-probabilities of spans, not {sorted(more)}")
        steps, spans = self.read(batch)
        wanted, compared = set(extra), "hidden" in extra
        if compared and self.head is None:
            wanted = wanted - {"hidden"} | {*TOP_K[: 0 if self.align else None]}
        return self.output_of(batch, self.module(steps, frozenset(wanted)), spans, compared=compared)
