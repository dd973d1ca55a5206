"""Base class of servers with an OpenAI-style API whose requests contain token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

import torch

from mmrl.config.schema import Piece
from mmrl.core.types import Prompt
from mmrl.kv_cache.layout import placeholders
from mmrl.runtime.json_client import as_json, png
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.serving.server import ADAPTER, PROBE, Server, Weights
from mmrl.vision.serving.wire import (
    NEVER,
    Answer,
    Sampling,
    WrongAnswer,
    WrongWeights,
    check_answer,
    numbers_of,
)

MODEL = "policy"  # name of the model on the servers


@dataclass(frozen=True)
class Question:
    """A request for `n` answers to a prompt, before conversion to the server's own format.

    Args:
        ids: Token ids of the prompt, with a placeholder for every feature of an image.
        sampling: Sampling options.
        seed: Seed of the first answer; the next answer has the next seed.
        n: Number of answers.
        end: Tokens that end an answer.
        forbidden: Media placeholders, which answers must not contain.
        logprobs: Whether to return log-probabilities of the answer.
        version: Version of the weights.
        adapter: Whether the request names the LoRA adapter instead of the model.
        images: Images as data URLs, and `image_token`, their placeholder.
    """

    ids: list[int]
    sampling: Sampling
    seed: int
    n: int
    end: list[int]
    forbidden: list[int]
    logprobs: bool
    version: str
    adapter: bool
    images: tuple[str, ...] = ()
    image_token: int = -1

    @property
    def model(self) -> str:
        """Name of the model or adapter; the name of an adapter contains the version of its weights."""
        return adapter_of(self.version) if self.adapter else MODEL

    @property
    def bias(self) -> dict[str, float]:
        """Logit bias of the placeholders, keyed by token id."""
        return {str(token): NEVER for token in self.forbidden}


@dataclass(frozen=True)
class Choice:
    """One answer from a server's response; unreported fields are None or empty.

    Args:
        ids: Token ids of the answer.
        logp: Log-probability of each token; None for tokens that the server leaves out.
        prompt: Token ids of the prompt, as the server read it.
        ended: Whether the server says that the last token ends the answer.
        versions: Versions of the weights that wrote the answer.
    """

    ids: list[int] | None
    logp: list[float | None] | None
    prompt: list[int] | None
    ended: bool
    versions: Set[str] = frozenset()


def adapter_of(version: str) -> str:
    """Return the name of an adapter on the servers, which contains the version of its weights."""
    return f"{ADAPTER}-{version}"


class Backend(Server):
    """Base class of server types. By default a server's weights cannot be replaced.

    Attributes:
        takes: What can be replaced while the server runs: "adapter", "model".
        families: Types of models that read images of prompts.
        token_ids, logprobs: Options of a request that ask for token ids and log-probabilities.
    """

    takes: ClassVar[frozenset[str]] = frozenset()
    families: ClassVar[frozenset[str]] = frozenset()
    token_ids: ClassVar[str]
    logprobs: ClassVar[str]
    echoes: ClassVar[bool] = True  # whether replies repeat the token ids of the prompt
    started_with = ""  # version of the weights that the server has from its start
    held = ""  # as `started_with`, but reset if the server fails, to check its weights again

    @classmethod
    def write(cls, question: Question) -> dict[str, Any]:
        """Write a request in the form of this kind of server."""
        raise NotImplementedError

    @classmethod
    def read(cls, reply: Any, question: Question) -> list[Choice]:
        """Read the answers in the reply to a request; may raise `LookupError`, TypeError or ValueError."""
        raise NotImplementedError

    @classmethod
    def command(cls, policy: Piece, *, cpu: bool) -> list[str]:
        """Return the arguments of the command that starts a server, without its address."""
        raise NotImplementedError

    @classmethod
    def request(cls, question: Question) -> dict[str, Any]:
        """Create a request for answers: the question, and its body in this server type's format."""
        return {"question": question, "body": cls.write(question)}

    def ask(self, request: Mapping[str, Any], sizes: list[int]) -> bytes:
        body = as_json(request["body"])
        sizes.append(len(body))
        return self.generate(body)

    def answers(self, data: bytes, request: Mapping[str, Any], uid: str, version: str) -> list[Answer]:
        question, wrong = request["question"], f"the answer of the server '{self.url}' to prompt '{uid}'"
        try:
            choices = self.read(json.loads(data), question)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise WrongAnswer(f"{wrong} is not that of a {self.title} ({error!r}): {data[:200]!r}") from None
        if len(choices) != question.n:
            raise WrongAnswer(f"{wrong} holds {len(choices)} answers instead of {question.n}")
        answers = []
        for number, choice in enumerate(choices):
            if choice.ids is None or (choice.prompt is None and self.echoes):
                raise WrongAnswer(
                    f"{wrong} holds no token ids, which `{self.token_ids}` asks for: it is too old for this "
                    "engine, which takes no text in their place"
                )
            if question.logprobs and choice.logp is None:
                raise WrongAnswer(
                    f"{wrong} holds no log-probabilities, which `{self.logprobs}` asks for; set "
                    "`logprobs: false` to do without"
                )
            if choice.prompt not in (None, question.ids):
                raise WrongAnswer(
                    f"{wrong} is about other tokens: {len(choice.prompt)} instead of {len(question.ids)}, or "
                    "others of them; does its processor expand images as the policy's does?"
                )
            if other := choice.versions - {version}:
                raise WrongWeights(f"{wrong} comes from the weights {sorted(other)} instead of '{version}'")
            ids = torch.tensor(choice.ids, dtype=torch.int64)
            logp = (choice.logp or []) if question.logprobs else [None] * len(ids)
            if len(logp) != len(ids):
                raise WrongAnswer(f"{wrong} holds {len(logp)} log-probabilities of {len(ids)} tokens")
            known = torch.tensor([value or 0.0 for value in logp])
            stopped = bool(choice.ids) and choice.ids[-1] in question.end
            name = f"answer {number} of the server to prompt '{uid}'"
            # An answer that ends at another token than the policy's end tokens counts as truncated.
            limit = len(ids) if choice.ended else question.sampling.max_completion_length
            settings = {"logit_bias": question.bias, "max_tokens": limit}
            check_answer(Answer(ids, known, stopped), settings, name)
            missing = torch.tensor([value is None for value in logp])
            answers.append(Answer(ids, known.masked_fill(missing, torch.nan), stopped))
        return answers

    def version(self) -> str | None:
        version = super().version()
        self.held = "" if version is None else self.held
        return version

    def parse_version(self, info: Any) -> str:
        return self.held or "unknown"

    def load(self, weights: Weights) -> None:
        """Record the version of the initial weights; raise RuntimeError if another version is recorded."""
        if self.started_with not in ("", weights.version):
            raise RuntimeError(
                f"the weights of the policy changed, and the server '{self.url}' cannot take others "
                f"({self.title})"
            )
        self.started_with = self.held = weights.version

    def checksum(self) -> str:
        """Return "": these servers report no hash of their weights."""
        return ""

    def swap_adapter(self, weights: Weights, prefix: str) -> None:
        """Load an adapter under a name with its version, and unload the adapters of other versions."""
        name, models = adapter_of(weights.version), json.loads(self._at("v1/models", PROBE).get())["data"]
        loaded = {model["id"] for model in models if model["id"].startswith(ADAPTER)}
        if name not in loaded:
            self.post(f"{prefix}load_lora_adapter", {"lora_name": name, "lora_path": str(weights.folder)})
        for other in loaded - {name}:
            self.post(f"{prefix}unload_lora_adapter", {"lora_name": other})


def one_each(ids: Sequence[int], token: int) -> list[int]:
    """Collapse each image's placeholders to a single one, which the server expands."""
    return [one for held, run in groupby(ids) for one in ([held] if held == token else run)]


def with_images(
    question: Question, encoder: PromptEncoder, prompt: Prompt | None, encoded: EncodedPrompt
) -> Question:
    """Add the images of a prompt to a request, as data URLs of PNG files.

    Raises ValueError unless the media are images of the prompt, each with one run of placeholders.
    """
    number, token = numbers_of(encoded)["image"], placeholders(encoder.core.config)["image"]
    runs = sum(held == token for held, _ in groupby(question.ids))
    media = prompt.media if prompt else ()
    if not number == runs == len(media):
        raise ValueError(
            f"`vision.openai_server` sends the images of prompts only, each with placeholders that stand "
            f"together: prompt '{encoded.uid}' has {len(media)}, its conversation {number}, in {runs} "
            "places; use `vision.vllm`"
        )
    images = tuple(f"data:image/png;base64,{png(medium.load().pixels[0])}" for medium in media)
    return replace(question, images=images, image_token=token)
