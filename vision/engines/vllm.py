"""Engine that samples from vLLM servers, which run in another environment or on other machines."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from mmrl.config.binding import Recipe
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ShareBelowOne,
)
from mmrl.config.registry import engine
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.runtime.fsdp import in_shards
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.serving.agreement import check_agreement, gap
from mmrl.vision.serving.command import command_lines
from mmrl.vision.serving.servers import ADAPTER, LOCK, Servers, Source, locked
from mmrl.vision.serving.weights import WeightsWriter
from mmrl.vision.serving.wire import Answer, Sampling, check_media, media_of, request_of

MODEL = "policy"  # name of the model on the servers


@dataclass(frozen=True)
class Group:
    """A pending request: a prompt, its indices in the list of prompts, and the future of its answers."""

    prompt: Prompt
    encoded: EncodedPrompt
    places: list[int]
    request: Mapping[str, Any]
    answers: Future[tuple[list[Answer], Source]]


class ServedPolicy(TokenPolicy, Protocol):
    """A token policy whose weights are sent to servers."""

    module: nn.Module
    adapter: Any  # LoRA adapter; None if the model itself is trained


@engine(sets_tags={"finish"})
@dataclass(eq=False)
class Vllm:
    """Sample answers from vLLM servers, which get the weights of the policy after each update.

    `mmrl serve-command` prints the command that starts a server, in an environment of its own (vLLM 0.32).
    Requests contain token ids and image tensors, so that template and preprocessing cannot differ. If a
    server dies, its requests go to another server with the same seed. A server that returns gets the weights
    first. For every kind of media, log-probabilities of answers are compared with the policy's at the start,
    after 1, 2, 4, ... weight updates, and when a server joins; a difference beyond rounding ends the run.
    The engine records no entropies and supports no stop strings.

    Args:
        policy: The policy: Qwen2-VL, Qwen2.5-VL, Qwen3-VL (without videos), LLaVA, or a language model.
        servers: Addresses of the servers, such as http://localhost:8000.
        max_completion_length: Maximal number of tokens in an answer.
        temperature: Divides the logits; 0: greedy decoding.
        top_p: Nucleus sampling: keeps the most likely tokens up to this total probability.
        top_k: Keeps the k most likely tokens; 0: all.
        min_p: Keeps tokens with at least this fraction of the highest probability.
        parallel: Number of concurrent requests; each has one prompt.
        request_timeout: Seconds until the answers to a prompt must have arrived.
        timeout: Seconds to wait for a server while no server is alive.
        weights_folder: Folder for weights, which learner and servers can read; empty: a folder of this user
            on this machine.
    """

    policy: ServedPolicy
    _: KW_ONLY
    stream: Stream
    recipe: Recipe
    servers: tuple[str, ...]
    max_completion_length: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0
    top_p: PositiveShare = 1.0
    top_k: NonNegativeInt = 0
    min_p: ShareBelowOne = 0.0
    parallel: PositiveInt = 64
    request_timeout: PositiveFloat = 600.0
    timeout: PositiveFloat = 300.0
    weights_folder: str = ""
    notes: ClassVar[frozenset[str]] = frozenset({"logp", "token", "temperature"})
    answers_elsewhere: ClassVar[bool] = True  # so other engines cannot decode token by token

    def __post_init__(self) -> None:
        if not self.servers or len({*self.servers}) < len(self.servers):
            raise ConfigError("`servers` must name one address or more, none of them twice")
        if self.recipe.policy.options.get("transform"):
            raise ConfigError(
                "`vision.vllm` serves the model without `policy.transform`; use `vision.generate`"
            )
        own = Path(tempfile.gettempdir()) / f"mmrl-weights-{os.getuid()}"
        of_servers = hashlib.sha256(" ".join(self.servers).encode()).hexdigest()[:8]
        self.folder = (Path(self.weights_folder) if self.weights_folder else own).absolute() / of_servers
        self.writer = WeightsWriter(self.policy, self.folder)
        limits = {"request_timeout": self.request_timeout, "timeout": self.timeout}
        self.asking = Servers(self.servers, self.folder, parallel=self.parallel, **limits)
        self.begun: tuple[list[Prompt], list[Group], str] | None = None
        self.compared: set[tuple] = set()  # finished comparisons: kind of media, updates, joins
        self.to_compare: list[tuple[str, str, Rollouts]] = []  # pending: kind of media, server, answers
        self.stand_in: Rollouts = ()  # dummy rows, for forward passes that only other processes need

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample an answer for every entry of `prompts`, in order."""
        if self.begun is None or [*map(id, self.begun[0])] != [*map(id, prompts)]:
            self.ask(prompts)
        assert self.begun is not None  # `ask` set it
        (_, groups, version), self.begun = self.begun, None
        rows: dict[int, Trajectory] = {}
        with self.asking.collecting():
            for group in groups:
                rows |= zip(group.places, self._rows(group), strict=True)
            self._compare(groups, version)  # for servers that joined since `ask`
        return tuple(rows[place] for place in range(len(prompts)))

    def to_send(self) -> Iterable[torch.Tensor]:
        """Return the parameters that servers need: of the adapter, or of the whole model."""
        return self.writer.tensors().values()

    def send(self) -> None:
        """Write the current weights, which `ask` loads into the servers."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self.folder / LOCK):
            self.writer()

    def compare(self, even: Callable[..., Iterable[tuple]]) -> None:
        """Compare pending answers with a sharded policy; with `even`, processes run equally many passes."""
        due, self.to_compare = self.to_compare, []
        for (kind, url, rows), counts, _ in even(due, ("", "", self.stand_in)):
            if counts:
                check_agreement(self.policy, kind, url, rows)
            else:
                gap(self.policy, rows)

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Request answers to `prompts` from the current weights; `rollout` collects the answers."""
        check_media(self.policy.prompt_encoder.core.config, prompts)
        self._check_adapter(prompts)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(prompt.uid, []).append(place)
        version = self.asking.bring(self.writer).version
        with self.asking.collecting():
            groups = [self._begin(prompts[where[0]], where, version) for where in places.values()]
            self._compare(groups, version)  # now, because the policy may be updated before `rollout`
        self.begun = list(prompts), groups, version

    def pop_metrics(self) -> Mapping[str, float]:
        """Return metrics since the last call: living servers, repeated requests, seconds of work."""
        return self.asking.take()

    @staticmethod
    def serve_commands(policy: Piece, options: Mapping[str, Any], *, cpu: bool = False) -> list[str]:
        """Return the command lines that start the servers."""
        return command_lines(policy, options, MODEL, cpu=cpu)

    def _check_adapter(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError if prompts have images and videos, and the vision tower has an adapter.

        vLLM 0.32 would crash: it encodes both kinds in one step, but arranges adapter inputs for one batch.
        """
        if self.policy.adapter is None or self.recipe.policy.options.get("freeze_vision_tower", True):
            return
        kinds = {medium.kind: prompt.uid for prompt in prompts for medium in prompt.media}
        if len(kinds) > 1:
            raise ValueError(
                f"vLLM 0.32 cannot encode images (prompt '{kinds['image']}') and videos (prompt "
                f"'{kinds['video']}') at the same time with an adapter of the vision tower; set "
                "`policy.freeze_vision_tower: true`, or keep them in runs of their own"
            )

    def _begin(self, prompt: Prompt, places: list[int], version: str) -> Group:
        sampling = Sampling(self.max_completion_length, self.temperature, self.top_p, self.top_k, self.min_p)
        encoder = self.policy.prompt_encoder
        encoded = encoder.encode(prompt)
        seed = int(torch.randint(1 << 31, (1,), generator=self.stream.generator("vllm", prompt.uid)))
        request = request_of(
            encoder,
            encoded,
            sampling,
            model=ADAPTER if self.policy.adapter is not None else MODEL,
            seed=seed,
            n=len(places) if self.temperature else 1,
            salt=version,
        )
        return Group(prompt, encoded, places, request, self.asking.ask(prompt.uid, request))

    def _rows(self, group: Group) -> list[Trajectory]:
        """Wait for the answers to a prompt, and make their rows."""
        answers, _ = group.answers.result()
        # A greedy request has one answer for all entries.
        return [self._row(group, answers[number % len(answers)]) for number in range(len(group.places))]

    def _row(self, group: Group, answer: Answer) -> Trajectory:
        """Convert an answer of a server to a row."""
        ids, temperature = answer.ids, self.temperature or 1.0  # greedy: as in `vision.generate`
        finish = "stop" if answer.stopped else "length"
        outcome = Outcome(text=self.policy.prompt_encoder.text(ids), end=len(ids), tags={"finish": finish})
        notes = {"logp": answer.logp, "token": ids, "temperature": torch.full((len(ids),), temperature)}
        steps = TokenRow(group.encoded, ids, temperature)
        return Trajectory(group.prompt, group.prompt.uid, (outcome,), steps, len(ids), notes)

    def _compare(self, groups: Sequence[Group], version: str) -> None:
        """Compare answers of every server to every kind of media with the policy, if that is due.

        A comparison is due at the start, after 1, 2, 4, ... weight updates, and after a server joins. A new
        adapter is 0 and updates are small, so only later comparisons show that a server ignores the adapter.
        """
        end = torch.tensor(self.policy.prompt_encoder.end[:1])
        self.stand_in = (self._row(groups[0], Answer(end, torch.zeros(1), True)),)
        moment = self.writer.updates.bit_length(), tuple(server.joins for server in self.asking.servers)
        due = {(media_of(group.encoded), *moment) for group in groups} - self.compared
        if not due or self.writer.version() != version:  # the answers are from older weights
            return
        seen: set[tuple[str, Source]] = set()  # one group per kind of media and server
        for group in groups:
            kind, (answers, source) = media_of(group.encoded), group.answers.result()
            if (kind, source) not in seen:
                seen.add((kind, source))
                if self.top_p < 1 or self.top_k or self.min_p:  # sampling truncates the policy's distribution
                    answers, source = self._undistorted(group)
                rows = tuple(self._row(group, answer) for answer in answers)
                self.to_compare.append((kind, source.url, rows))
        self.compared |= due
        if not in_shards(self.policy.module):  # else the training loop calls `compare` on all processes
            self.compare(lambda due, stand_in: ((one, True, False) for one in due))

    def _undistorted(self, group: Group) -> tuple[list[Answer], Source]:
        """Request the first tokens of one answer anew, without truncated sampling."""
        settings = {**group.request["sampling_params"], "top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1}
        settings["max_tokens"] = min(16, self.max_completion_length)
        request = {**group.request, "sampling_params": settings}
        return self.asking.ask(group.prompt.uid, request).result()
