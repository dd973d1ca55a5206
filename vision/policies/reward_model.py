"""A reward model: a vision-language model with a linear layer that scores a prompt and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import policy as register
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory, reading
from mmrl.data.media_reader import MediaReader
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.models import classifiers
from mmrl.vision.models.conversation_encoder import ConversationEncoder
from mmrl.vision.models.model_families import check_length
from mmrl.vision.models.processor import pixel_limits
from mmrl.vision.policies.critic import ValueModel, value_model
from mmrl.vision.policies.tokens import Tokens

STD = 0.02  # initial deviation of the linear layer if the model's config has no `initializer_range`


class Backbone(Tokens):
    """The model that computes hidden states for the linear layer; its folder may be a saved reward model."""

    load_model = staticmethod(classifiers.load_backbone)


@register
class RewardModel:
    """A reward model: a (vision-)language model with a linear layer that scores a prompt and its answer.

    The layer reads the last hidden state of the conversation in the model's chat template, as in TRL's
    `RewardTrainer`. A row is one answer and one step. An answer may be a text, an image or a video; an image
    or a video is shown at the end of the last user turn. The output is "score", or one output "score/NAME"
    for each label. All log-probabilities are 0.

    `save` writes a folder for `AutoModelForSequenceClassification` if transformers has that class for the
    family, otherwise the language model and `score.safetensors`; with LoRA the adapter and
    `score.safetensors` (`mmrl export` merges them).

    Args:
        model: Hub id or folder of a language model, a vision-language model or a saved reward model.
        labels: Names of the scores, such as "helpful" and "harmless"; empty: one score without a name, or the
            labels of a saved reward model.
        dtype: Precision of frozen weights and of the computation; the linear layer is in float32.
        attn_implementation: Attention of transformers, such as "sdpa" or "eager".
        lora_rank: Rank of a LoRA adapter that is trained with the linear layer; 0: train the whole model.
        lora_alpha: LoRA alpha; None: twice the rank.
        lora_target_modules: Names of the linear layers that get an adapter; empty: all.
        adapter: Folder of a saved adapter with its `score.safetensors`.
        freeze_vision_tower: Train only the language model.
        frozen: Train nothing.
        gradient_checkpointing: Recompute layers in the backward pass: less memory, more time.
        share_prefix: Whether answers share the computation of their common beginning, such as an image.
        min_pixels: Minimal pixels of an image after the image processor; None: the processor's default.
        max_pixels: Maximal pixels of an image after the image processor; None: the processor's default.
        chat_template_kwargs: Variables of the chat template, for all conversations.
    """

    outputs = frozenset({"score"})
    makes = "text"

    def __init__(
        self,
        *,
        model: str,
        labels: tuple[str, ...] = (),
        dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16",
        attn_implementation: str = "sdpa",
        lora_rank: NonNegativeInt = 0,
        lora_alpha: PositiveFloat | None = None,
        lora_target_modules: tuple[str, ...] = (),
        adapter: str = "",
        freeze_vision_tower: bool = True,
        frozen: bool = False,
        gradient_checkpointing: bool = False,
        share_prefix: bool = True,
        min_pixels: Annotated[PositiveInt, AtMost("max_pixels")] | None = None,
        max_pixels: PositiveInt | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokens = Backbone(
            model=model,
            dtype=dtype,
            attn_implementation=attn_implementation,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_target_modules=lora_target_modules,
            adapter=adapter,
            freeze_vision_tower=freeze_vision_tower,
            frozen=frozen,
            gradient_checkpointing=gradient_checkpointing,
            share_prefix=share_prefix,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            chat_template_kwargs=chat_template_kwargs,
        )
        self.encoder = ConversationEncoder(
            self.tokens.processor,
            self.tokens.core,
            pixels=pixel_limits({"min_pixels": min_pixels, "max_pixels": max_pixels}),
            variables=chat_template_kwargs,
        )
        saved = saved_score(model, adapter)  # after the download of the model
        self.labels = check_labels(labels, saved and saved[1])
        std = getattr(self.tokens.model.config.get_text_config(), "initializer_range", STD)
        part = ValueModel(self.tokens.module, max(1, len(self.labels)), std=std, bias=False)
        self.module: nn.Module = part.requires_grad_(False) if frozen else part
        self.saved = saved is not None  # whether the linear layer was loaded
        if saved:
            self._set_score(saved[0])

    @staticmethod
    def check_folders(options: Mapping[str, Any], start: str = "") -> None:
        """Raise `ValueError` if weights or labels are missing or do not fit the model; see `Tokens`."""
        model, adapter = str(options.get("model", "")), str(options.get("adapter") or "")
        folders = [Path(name).expanduser() for name in (model, adapter, start) if name]
        for folder in filter(Path.is_dir, folders):
            saved = saved_score(str(folder), str(folder) if folder == Path(adapter).expanduser() else "")
            check_labels(tuple(options.get("labels") or ()), saved and saved[1])
        named = [str(folder) for folder in folders if (folder / "config.json").is_file()]
        whole = [name for name in named if classifiers.is_classifier(name)]
        for name in whole:
            classifiers.load_classifier(name, device_map={"": "meta"})
        if not whole:
            Tokens.check_folders(options, start)

    prompt_check = staticmethod(Tokens.prompt_check)

    @property
    def scorer(self) -> ValueModel:
        """The model and its linear layer, without the wrapper of data parallelism."""
        return value_model(self.module)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs: "score", or "score/NAME" for each label."""
        return tuple(f"score/{label}" for label in self.labels) or ("score",)

    def render(self, prompt: Prompt) -> str:
        """Render a prompt with the chat template; media become `<image: 64 tokens>`."""
        return self.tokens.render(prompt)

    def media_reader(self, options: Mapping[str, Any], root: Path | None = None) -> MediaReader:
        """Create the reader that loads the media of prompts."""
        return self.tokens.media_reader(options, root)

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Encode a prompt and its answer as a row with one step: the hidden state of the last token."""
        with reading(prompt):
            encoded = self.encoder.conversation(prompt, outcome)
            check_length(encoded.next_position, self.encoder.limit)
        ids = torch.tensor(self.encoder.end[:1])  # unused: the step reads the state before this token
        answer = replace(outcome, end=1, tags={"finish": "stop", **outcome.tags})
        row = TokenRow(encoded, ids)
        return Trajectory(prompt, prompt.uid, (answer,), row, 1, on_policy=False)

    def collate(self, rollouts: Rollouts) -> Batch:
        """Collate rows to a batch (N, 1); the common beginning of conversations is stored once."""
        return self.tokens.collate(rollouts)

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        scores = self.module(batch.steps)  # (N, 1, labels)
        columns = dict(zip(self.names, scores.unbind(-1), strict=True)) if "score" in extra else {}
        return StepOutput(torch.zeros_like(scores[..., 0]), columns)

    def scores(self, rows: Rollouts, batch_size: int) -> Tensor:
        """Compute the scores (N, labels) of encoded answers, in float64 and on the CPU."""
        parts = [torch.zeros(0, len(self.names), dtype=torch.float64)]
        for at in range(0, len(rows), batch_size):
            steps = self.collate(rows[at : at + batch_size]).steps
            parts.append(self.scorer(steps)[:, 0].double().cpu())
        return torch.cat(parts)

    def merge(self) -> None:
        """Merge the adapter into the weights, so that `save` writes the whole model."""
        self.tokens.merge()

    def save(self, folder: Path) -> None:
        """Write the model's folder, in the format that the class describes."""
        tokenizer, score = self.tokens.processor.tokenizer, self.scorer.head.weight
        if self.tokens.adapter is None and classifiers.classifier_class(self.tokens.model.config):
            pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            classifiers.save_classifier(self.tokens.model, score, self.labels, pad, folder)
            self.tokens.processor.save_pretrained(str(folder))
            return
        self.tokens.save(folder)
        classifiers.write_score(score, self.labels, folder)

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote, bit for bit."""
        if (saved := classifiers.read_score(folder)) is None:
            raise ConfigError(f"'{folder}' has no reward model: it lacks `{classifiers.SCORE}`")
        check_labels(self.labels, saved[1])
        if self.tokens.adapter is None and classifiers.is_classifier(str(folder)):
            classifiers.load_core(self.tokens.model, folder)
        else:
            self.tokens.load(folder)
        self._set_score(saved[0])

    @torch.no_grad()
    def _set_score(self, weight: Tensor) -> None:
        head = self.scorer.head.weight
        if weight.shape != head.shape:
            raise ConfigError(f"the saved layer has the shape {[*weight.shape]}, not {[*head.shape]}")
        head.copy_(weight)


def saved_score(model: str, adapter: str) -> tuple[Tensor, tuple[str, ...]] | None:
    """Read the saved linear layer and labels of an adapter, or of a model; None for a new reward model."""
    if adapter and (saved := classifiers.read_score(adapter)) is None:
        raise ConfigError(
            f"the adapter '{adapter}' has no `{classifiers.SCORE}`, so it is none of a reward model"
        )
    return saved if adapter else classifiers.read_score(model)


def check_labels(labels: tuple[str, ...], saved: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the `saved` labels of a reward model, or the configured `labels` if it is new (None saved).

    Raises `ConfigError` if `labels` has a name twice, or is given and differs from `saved`.
    """
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise ConfigError(f"`labels` has '{twice[0]}' twice")
    if saved is not None and labels and labels != saved:
        raise ConfigError(
            f"the saved reward model has the labels {', '.join(saved) or 'none'}, not {', '.join(labels)}; "
            "leave `labels` out"
        )
    return labels if saved is None else saved
