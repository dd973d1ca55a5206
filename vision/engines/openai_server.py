"""Engine that samples from servers of SGLang, vLLM or llama.cpp; requests contain token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.registry import engine
from mmrl.config.schema import Piece
from mmrl.core.types import Prompt, Trajectory
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.serving.backend import Backend, Question, with_images
from mmrl.vision.serving.backends import BACKENDS, command_lines
from mmrl.vision.serving.groups import Group
from mmrl.vision.serving.served_engine import ServedEngine
from mmrl.vision.serving.server import Weights
from mmrl.vision.serving.wire import Answer, Sampling

NOTES = frozenset({"token", "temperature"})


@engine(sets_tags={"finish"})
@dataclass(eq=False)
class OpenaiServer(ServedEngine):
    """Sample answers from servers with an OpenAI-style API that read and return token ids.

    Prompts are sent as token ids, never as text, and an answer without token ids is an error. The kinds
    of servers (`backend`) differ in the media and weights that they accept:

    - `sglang`: text and images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL; accepts new weights and adapters.
    - `vllm`: text, with `/v1/completions` of a vLLM server without special options; accepts only adapters.
    - `llama.cpp`: text; its weights (a GGUF file) cannot change, so the policy must not learn.

    SGLang preprocesses images itself: if it expands an image to other placeholders than the policy's
    processor, this is an error. Weights, lost servers and log-probabilities are handled as in `vision.vllm`.

    Args:
        policy: The policy: a language model, or with `sglang` also a model that reads images.
        backend: Kind of the servers.
        servers: Addresses of the servers, such as http://localhost:30000.
        logprobs: Whether the servers return log-probabilities. If not, answers are not compared with the
            policy, and images and objectives that read the engine's log-probabilities are errors.
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

    _: KW_ONLY
    backend: Literal["sglang", "vllm", "llama.cpp"]
    logprobs: bool = True

    def server_class(self) -> type[Backend]:
        return BACKENDS[self.backend]

    @staticmethod
    def notes_of(options: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of the per-token values that the engine records with these options."""
        return NOTES | ({"logp"} if options.get("logprobs", True) else set())

    @staticmethod
    def check_learning(policy: Piece, options: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the servers cannot load the trained weights of a policy while they run."""
        name, kind = options["backend"], BACKENDS[options["backend"]]
        what = _learned(policy)
        if what not in kind.takes:
            able = ", ".join(repr(other) for other, backend in BACKENDS.items() if what in backend.takes)
            advice = ", or an adapter (`policy.lora_rank`)" if "adapter" in kind.takes else ""
            raise ConfigError(
                f"a server of `backend: {name}` cannot take the weights of {WORDS[what]} while it runs, so "
                f"it answers only for a policy that does not learn (`mmrl evaluate`); use {able}{advice}"
            )
        if what == "adapter" and kind.families and not policy.options.get("freeze_vision_tower", True):
            raise ConfigError(
                f"a server of `backend: {name}` ignores an adapter of the vision tower; set "
                "`policy.freeze_vision_tower: true`, or use `vision.vllm`"
            )

    @staticmethod
    def serve_commands(policy: Piece, options: Mapping[str, Any], *, cpu: bool = False) -> list[str]:
        return command_lines(policy, options, cpu=cpu)

    @staticmethod
    def check_prompt(options: Mapping[str, Any], config: Any, prompt: Prompt) -> None:
        """Raise `ConfigError` if a prompt has media that the servers do not accept for this `config`."""
        kinds = {medium.kind for medium in prompt.media}
        _check_kinds(options["backend"], options.get("logprobs", True), config.model_type, prompt.uid, kinds)

    def check_kinds(self, uid: str, kinds: Set[str]) -> None:
        family = self.policy.prompt_encoder.core.config.model_type
        _check_kinds(self.backend, self.logprobs, family, uid, kinds)

    def compare_groups(self, groups: Sequence[Group], version: str) -> None:
        """Compare answers with the policy, if the servers return log-probabilities; see `ServedEngine`."""
        if self.logprobs:
            super().compare_groups(groups, version)

    def _written(self) -> Weights:
        if _learned(self.recipe.policy) in self.server_class().takes:
            return super()._written()
        self.make_folder()  # the folder holds lock files only
        return Weights(self.folder, self.writer.version(), False)

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
        encoder, kind = self.policy.prompt_encoder, self.server_class()
        question = Question(
            encoded.ids.tolist(),
            Sampling(most, temperature, self.top_p, self.top_k, self.min_p),
            seed=seed,
            n=n if temperature else 1,
            end=list(encoder.end),
            forbidden=list(encoder.placeholders),
            logprobs=self.logprobs,
            version=version,
            adapter=self.policy.adapter is not None and "adapter" in kind.takes,
        )
        return kind.request(with_images(question, encoder, prompt, encoded) if encoded.media else question)

    def undistorted(self, group: Group) -> dict[str, Any]:
        asked: Question = group.request["question"]
        sampling = Sampling(min(16, asked.sampling.max_completion_length), asked.sampling.temperature)
        return self.server_class().request(replace(asked, sampling=sampling, n=1))

    def _row(self, group: Group, answer: Answer, versions: torch.Tensor | None = None) -> Trajectory:
        row = super()._row(group, answer, versions)
        kept = self.notes_of({"logprobs": self.logprobs})
        return replace(row, notes={name: note for name, note in row.notes.items() if name in kept})


WORDS = {"adapter": "an adapter", "model": "a whole model"}


def _learned(policy: Piece) -> str:
    """Return which weights of a policy are trained: "adapter", or "model" for the whole model."""
    return "adapter" if policy.options.get("lora_rank") or policy.options.get("adapter") else "model"


def _check_kinds(backend: str, logprobs: bool, family: str, uid: str, kinds: Set[str]) -> None:
    """Raise `ConfigError` if a prompt has kinds of media that the servers do not accept."""
    families = BACKENDS[backend].families
    if other := kinds - ({"image"} if family in families and logprobs else set()):
        why = f"models that read images there: {', '.join(sorted(families)) or 'none'}"
        if not logprobs and "image" in other:
            why += "; images need `logprobs: true`, which shows whether the server sees the same pixels"
        shown = " and ".join(f"{kind}s" for kind in sorted(other))
        raise ConfigError(
            f"`vision.openai_server` cannot send the {shown} of prompt '{uid}' to `backend: {backend}` for a "
            f"model of type '{family}' ({why}); use `vision.vllm`"
        )
