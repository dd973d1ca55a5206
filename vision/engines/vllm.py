"""Engine that samples from vLLM servers, which run in another environment or on other machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import (
    PositiveInt,
    ShareBelowOne,
)
from mmrl.config.registry import engine
from mmrl.config.schema import Piece
from mmrl.core.types import Prompt, Rollouts
from mmrl.vision.decoding.decoding import first_tokens
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.serving.agreement import gap
from mmrl.vision.serving.branches import grow_on_servers, next_logp
from mmrl.vision.serving.broadcast import WeightsCopier
from mmrl.vision.serving.command import command_lines
from mmrl.vision.serving.groups import Group
from mmrl.vision.serving.pruning import check_pruning, without_pruned
from mmrl.vision.serving.served_engine import ServedEngine
from mmrl.vision.serving.server import ADAPTER, Server
from mmrl.vision.serving.weights import WeightsWriter
from mmrl.vision.serving.wire import (
    Sampling,
    check_kinds,
    check_media,
    modalities,
    request_of,
)

if TYPE_CHECKING:
    from mmrl.vision.decoding.branching import Branch, Grown

MODEL = "policy"  # name of the model on the servers


@engine(sets_tags={"finish"})
@dataclass(eq=False)
class Vllm(ServedEngine):
    """Sample answers from vLLM servers, which get the weights of the policy after each update.

    `mmrl serve-command` prints the command that starts a server, in an environment of its own (vLLM 0.32).
    Requests contain token ids and image tensors, so that template and preprocessing cannot differ. If a
    server dies, its requests go to another server with the same seed. A server that returns gets the weights
    first. For every kind of media, log-probabilities of answers are compared with the policy's at the start,
    after 1, 2, 4, ... weight updates, and when a server joins; a difference beyond rounding ends the run. The
    engine records no entropies and supports no stop strings. Every turn of a conversation (with
    `vision.with_tools` and others) is a separate request with all token ids and images so far; the server
    finds the earlier turns in its prefix cache.

    With `partial_rollouts`, the weights of several steps sample one answer. Each version of the weights
    recomputes the keys and values and adds a fixed number of tokens; the last version samples the rest. So
    the age of a token's weights depends only on its position. The note `weights_version` names the version.

    Args:
        policy: The policy: a language model, or a model of the families in `vision/serving/families/`.
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
        weight_transfer: How servers get weights. `folder`: servers read `weights_folder`. `broadcast`: the
            learner sends them over gloo, without a shared folder. This takes at most twice the memory of the
            trained weights, and once more for each further step of `max_staleness`.
        sleep_level: Level of vLLM's sleep mode while the policy learns, for servers on the learner's devices.
            0: stay awake; 1: keep weights in main memory, release keys and values; 2: release both, which
            needs a policy without adapter. A server on a CPU accepts the option but releases nothing.
        video_pruning_rate: Fraction of a video's tokens that servers drop before the language model: those
            most similar to the previous frame (Efficient Video Sampling, arXiv 2510.14624). At least one
            frame's tokens remain. Only for Qwen2.5-VL. Answers are then off-policy, which the objective must
            correct (`step_weight: [truncated_importance]`); `vllm/pruning_gap` measures the difference.
        partial_rollouts: Maximal tokens of an answer from the weights of one step; newer weights continue it.
            Needs `max_staleness` >= 2. true: `max_completion_length / max_staleness`. false: no limit.
    """

    _: KW_ONLY
    weight_transfer: Literal["folder", "broadcast"] = "folder"
    sleep_level: Literal[0, 1, 2] = 0
    video_pruning_rate: ShareBelowOne = 0.0
    partial_rollouts: bool | PositiveInt = False

    def __post_init__(self) -> None:
        if self.sleep_level == 2 and self.policy.adapter is not None:
            raise ConfigError(
                "`sleep_level: 2` drops the base weights, which servers of an adapter keep; set 1"
            )
        if self.sleep_level and len(self.recipe.engines) > 1:
            raise ConfigError("`sleep_level` needs `vision.vllm` as the only engine, which others would wake")
        if self.video_pruning_rate:
            check_pruning(self.policy.prompt_encoder.core.config)
        self.pruning_gaps: list[float] = []
        super().__post_init__()

    def server_class(self) -> type[Server]:
        return Server

    def check_kinds(self, uid: str, kinds: Set[str]) -> None:
        check_kinds(self.policy.prompt_encoder.core.config, uid, kinds)

    def make_writer(self) -> WeightsWriter:
        kind = {"folder": WeightsWriter, "broadcast": WeightsCopier}[self.weight_transfer]
        return kind(self.policy, self.folder)

    def pool_options(self) -> dict[str, Any]:
        return super().pool_options() | {"sleep_level": self.sleep_level}

    def part_size(self) -> bool | int:
        return self.partial_rollouts

    def check_rows(self, kind: str, url: str, rows: Rollouts) -> None:
        if self.video_pruning_rate and "video" in kind:
            self.pruning_gaps.append(gap(self.policy, rows))
        else:
            super().check_rows(kind, url, rows)

    def take_metrics(self) -> dict[str, float]:
        gaps, self.pruning_gaps = self.pruning_gaps, []
        return super().take_metrics() | ({"vllm/pruning_gap": sum(gaps) / len(gaps)} if gaps else {})

    def rest(self) -> None:
        """Put the servers to sleep at `sleep_level`, if no process waits for answers."""
        self.asking.rest()

    def grow(
        self, branches: Sequence[Branch], *, temperature: float | None = None, batch_size: int = 0
    ) -> list[Grown | None]:
        """Sample branches in one request each; `parallel` limits concurrency, and `batch_size` is ignored."""
        return grow_on_servers(self, branches, self.temperature if temperature is None else temperature)

    def first_words(self, prompts: Sequence[Prompt], words: Sequence[Sequence[str]]) -> list[list[float]]:
        """Request the probabilities of first words from the servers; see `Generate.first_words`."""
        tokens = first_tokens(self.policy.prompt_encoder.tokenizer, words)
        if not prompts:
            return []
        check_media(self.policy.prompt_encoder.core.config, prompts)
        listed = [token for several in tokens for token in several]
        asked = [(self.policy.prompt_encoder.encode(prompt), listed) for prompt in prompts]
        version = self.load_weights()
        with self.asking.collecting():
            logp = next_logp(self, asked, 0.0, version)
        sizes = [len(several) for several in tokens]
        shares = [torch.tensor(row, dtype=torch.float64).exp().split(sizes) for row in logp]
        return [[float(share.sum()) for share in row] for row in shares]

    @staticmethod
    def check_prompt(options: Mapping[str, Any], config: Any, prompt: Prompt) -> None:
        """Raise `ConfigError` if a prompt has media that vLLM does not accept for this model `config`."""
        check_media(config, [prompt])

    @staticmethod
    def serve_commands(policy: Piece, options: Mapping[str, Any], *, cpu: bool = False) -> list[str]:
        """Return the command lines that start the servers."""
        return command_lines(policy, options, MODEL, cpu=cpu)

    def check_together(self, kinds: Mapping[str, str]) -> None:
        """Raise ValueError if prompts have images and videos, and the vision tower has an adapter.

        vLLM 0.32 would crash: it encodes both kinds in one step, but prepares the adapter for one batch.
        """
        if self.policy.adapter is None or self.recipe.policy.options.get("freeze_vision_tower", True):
            return
        if len(modalities(self.policy.prompt_encoder.core.config, kinds)) > 1:
            raise ValueError(
                f"vLLM 0.32 cannot encode images (prompt '{kinds['image']}') and videos (prompt "
                f"'{kinds['video']}') at the same time with an adapter of the vision tower; set "
                "`policy.freeze_vision_tower: true`, or keep them in runs of their own"
            )

    def request(
        self,
        encoded: EncodedPrompt,
        n: int,
        most: int,
        seed: int,
        version: str,
        temperature: float,
        *,
        prompt: Prompt | None = None,
    ) -> dict[str, Any]:
        """Create the request for `n` answers of at most `most` tokens to an encoded prompt."""
        request = request_of(
            self.policy.prompt_encoder,
            encoded,
            Sampling(most, temperature, self.top_p, self.top_k, self.min_p),
            model=ADAPTER if self.policy.adapter is not None else MODEL,
            seed=seed,
            n=n if temperature else 1,
            salt=version,
        )
        return without_pruned(request, encoded, self.video_pruning_rate)

    def undistorted(self, group: Group) -> dict[str, Any]:
        """Create a request for the first (up to 16) tokens of one answer, without top-p, top-k, min-p."""
        settings = {**group.request["sampling_params"], "top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1}
        settings["max_tokens"] = min(16, settings["max_tokens"])
        return {**group.request, "sampling_params": settings}
