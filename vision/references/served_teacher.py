"""A teacher on vLLM servers: log-probabilities of the policy's answers from servers with frozen weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability
from mmrl.config.registry import reference
from mmrl.config.schema import Piece
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import cat_padded
from mmrl.core.types import Prompt
from mmrl.vision.decoding.token_steps import TokenSteps
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.references.teacher import FrozenTeacher, encoder_of
from mmrl.vision.serving.command import command_lines
from mmrl.vision.serving.scoring import FrozenServers, Scores, score_request, scores_of
from mmrl.vision.serving.wire import check_kinds, check_media, check_tensors, numbers_of

MOST = 20  # default of vLLM's --max-logprobs


@reference
class ServedTeacher(FrozenTeacher):
    """A frozen teacher on vLLM servers, which return its likely tokens at every step of an answer.

    Requests contain token ids and image tensors, as in `vision.vllm`. The servers score the policy's answers;
    they generate no text and receive no weights. The run checks at its start that all servers
    have the named model and equal weights, and after a resume that these are unchanged. A teacher of another
    model type reads prompts with its own template and image processor. Answers must be sampled at temperature
    1, because servers return log-probabilities at temperature 1.

    Args:
        model: Hub id or folder of the teacher, whose tokenizer and processor are read here.
        servers: Addresses of the servers, such as http://localhost:8001.
        served_model_name: Name of the model on the servers.
        checksum: Hash that the weights of all servers must have; empty: any hash that all servers share.
        beta: Divergence of the penalty `distillation`, as in TRL's DistillationTrainer: 1 is the reverse KL,
            0 the forward KL, between them the generalised Jensen-Shannon divergence.
        loss_top_k: Number of the teacher's top tokens that are compared; with `beta` above 0 the sampled
            token is compared too. Above 20 the servers need `--max-logprobs`.
        loss_add_tail: Whether all other tokens count as one more token; else both distributions are
            normalised on the compared tokens.
        align: Compare text spans that end at a token boundary of both tokenizers, for a teacher with another
            tokenizer (ALM, arXiv 2503.20083).
        span_temperature: Divides log-probabilities of spans; larger values weigh unlikely spans more.
        parallel: Number of concurrent requests; each has one answer.
        request_timeout: Seconds until the log-probabilities of an answer must have arrived.
        timeout: Seconds for which a request is repeated while no server answers.
    """

    holds = ""  # no model in this process (for memory estimates)

    def __init__(
        self,
        policy: Any,  # `vision.tokens`
        *,
        model: str,
        servers: tuple[str, ...],
        served_model_name: str = "teacher",
        checksum: str = "",
        beta: Probability = 1.0,
        loss_top_k: NonNegativeInt = 20,
        loss_add_tail: bool = True,
        align: bool = False,
        span_temperature: PositiveFloat = 1.0,
        parallel: PositiveInt = 64,
        request_timeout: PositiveFloat = 600.0,
        timeout: PositiveFloat = 300.0,
    ) -> None:
        check_support(servers, beta, loss_top_k, loss_add_tail, align)
        options = {"loss_top_k": loss_top_k, "loss_add_tail": loss_add_tail, "align": align}
        super().__init__(policy, model, beta=beta, span_temperature=span_temperature, **options)
        limits = {"parallel": parallel, "request_timeout": request_timeout, "timeout": timeout}
        self.servers = FrozenServers(
            servers, served_model_name, 0 if align else loss_top_k, checksum=checksum, **limits
        )

    @staticmethod
    def check_run(options: Mapping[str, Any], config: Any) -> None:
        """Raise `ValueError` if options such as the temperature rule out a comparison with the teacher."""
        given = {"beta": 1.0, "loss_top_k": MOST, "loss_add_tail": True, "align": False, **options}
        names = ("servers", "beta", "loss_top_k", "loss_add_tail", "align")
        check_support(*(given[name] for name in names))
        for piece in config.rollout.engine:
            temperature = piece.options.get("temperature", 1.0)
            if temperature not in (0, 1):  # 0 (greedy) records log-probabilities at 1
                raise ConfigError(
                    f"'{piece.name}' samples at the temperature {temperature}, and servers tell "
                    "log-probabilities at 1; set `temperature: 1.0`, or take `vision.teacher`"
                )
        FrozenTeacher.check_run(options, config)

    @staticmethod
    def check_prompts(options: Mapping[str, Any], prompts: Iterable[Prompt]) -> None:
        """Raise `ConfigError` for media that servers of the teacher's family do not take as tensors."""
        if encoder := encoder_of(str(options["model"])):
            config, shown = encoder.core.config, [prompt for prompt in prompts if prompt.media]
            check_media(config, shown)
            if shown:
                check_tensors(config, shown[0].uid)

    @staticmethod
    def serve_commands(policy: Piece, options: Mapping[str, Any], *, cpu: bool = False) -> list[str]:
        """Return the command lines that start the servers of the teacher."""
        teacher = Piece("vision.tokens", {"model": options["model"]})
        lines = command_lines(teacher, options, options.get("served_model_name", "teacher"), cpu=cpu)
        most = options.get("loss_top_k", MOST)
        return [f"{line} --max-logprobs {most}" if most > MOST else line for line in lines]

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        if more := extra - {"hidden"}:
            raise ValueError(f"a teacher on a server tells log-probabilities, not {sorted(more)}")
        learned = (batch.mask > 0).any(-1).nonzero()[:, 0].tolist()
        if any(float(batch.steps.temperature[row]) != 1.0 for row in learned):
            raise ValueError(
                "answers were sampled at another temperature than 1, at which servers tell log-probabilities"
            )
        steps, spans = self.read(batch)
        compared = "hidden" in extra
        top_k, empty = (self.loss_top_k if compared and not self.align else 0), torch.zeros(0)
        scores = self._scores(steps, learned, top_k)
        nothing = Scores(empty, torch.zeros(0, top_k).long(), torch.zeros(0, top_k))
        rows = [scores.get(row, nothing) for row in range(len(batch))]
        values = {"logp": cat_padded([row.logp[None] for row in rows])}
        if compared and not self.align:
            values["top_k_ids"] = cat_padded([row.top_k_ids[None] for row in rows], -1)
            values["top_k_logp"] = cat_padded([row.top_k_logp[None] for row in rows])
        device = batch.mask.device
        return self.output_of(
            batch, {name: value.to(device) for name, value in values.items()}, spans, compared=compared
        )

    def _scores(self, steps: TokenSteps, rows: list[int], top_k: int) -> dict[int, Scores]:
        """Request the scores of rows from the servers; the result is keyed by row."""
        encoder = self.encoder if self.translate else self.policy.prompt_encoder
        options = {"model": self.servers.model, "top_k": top_k, "salt": self.servers.checksum or "teacher"}
        requests, uids, places = [], [], []
        for row in rows:
            prompt, ids, where = self._whole(steps, row)
            kinds = {kind for kind, number in numbers_of(prompt).items() if number}
            check_kinds(encoder.core.config, prompt.uid, kinds)
            requests.append(score_request(encoder, prompt, ids, **options))
            uids.append(prompt.uid)
            places.append(where)
        replies = self.servers.score(requests, uids)
        parts = zip(replies, requests, places, uids, strict=True)
        return {row: scores_of(*part) for row, part in zip(rows, parts, strict=True)}

    def _whole(self, steps: TokenSteps, row: int) -> tuple[EncodedPrompt, Tensor, Tensor]:
        """Return a row's prompt (with media of replies), its other tokens, and the positions of its steps."""
        prompt, suffix = steps.prompts[int(steps.which[row])], steps.suffix(row)
        where = len(prompt.ids) + suffix.chosen
        if not steps.suffixes or steps.suffixes[row] is None:
            return prompt, suffix.ids, where
        both = {
            name: [part[name] for part in (prompt.media, suffix.media) if name in part]
            for name in dict.fromkeys((*prompt.media, *suffix.media))
        }
        ids, positions = (
            torch.cat([prompt.ids, suffix.ids]),
            torch.cat([prompt.positions, suffix.positions], 1),
        )
        media = {name: cat_padded(parts) for name, parts in both.items()}
        return EncodedPrompt(prompt.uid, ids, positions, media), ids[:0], where

    def state_dict(self) -> dict[str, Any]:
        """Return the hash of the servers' weights, for a comparison after a resume."""
        return {"checksum": self.servers.checksum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the servers have other weights than before."""
        if state.get("checksum") and self.servers.checksum and state["checksum"] != self.servers.checksum:
            raise ConfigError(
                f"the teacher has weights of the checksum '{self.servers.checksum}', and the run began with "
                f"'{state['checksum']}'"
            )


def check_support(
    servers: tuple[str, ...], beta: float, loss_top_k: int, loss_add_tail: bool, align: bool
) -> None:
    """Raise `ConfigError` if the options select no vocabulary entries whose probabilities are compared."""
    if not servers or len({*servers}) < len(servers):
        raise ConfigError("`servers` must name one address or more, none of them twice")
    if align:
        return
    if not loss_top_k and beta == 0:
        raise ConfigError("the forward KL (`beta: 0`) compares likely tokens: set `loss_top_k` above 0")
    if not loss_add_tail and loss_top_k + (beta > 0) < 2:
        raise ConfigError(
            "one token alone has the probability 1 in both distributions: set `loss_add_tail: true`, or a "
            "larger `loss_top_k`"
        )
