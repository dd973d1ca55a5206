"""A critic: a vision-language model that predicts a value for every step of an answer."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.config.registry import policy as register
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import pad_to
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.runtime.modules import LOW
from mmrl.vision.decoding.step_model import StepModel
from mmrl.vision.decoding.token_steps import TokenSteps
from mmrl.vision.policies.tokens import Tokens

HEAD = "value_head.safetensors"


class ValueModel(nn.Module):
    """Trainable module that predicts one or more values before every token of answers.

    Args:
        reader: Computes the hidden states.
        outputs: Number of values per token.
        std: Standard deviation of the initial weights.
        bias: Whether the linear layer has a bias, which starts at 0.
    """

    def __init__(self, reader: StepModel, outputs: int = 1, *, std: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.reader = reader
        inputs = reader.model.get_input_embeddings().weight
        dtype = torch.promote_types(torch.float32, reader.compute)
        self.head = nn.Linear(inputs.shape[1], outputs, bias, device=inputs.device, dtype=dtype)
        nn.init.normal_(self.head.weight, std=std)
        if bias:
            nn.init.zeros_(self.head.bias)
        for weight in reader.model.get_output_embeddings().parameters():
            if weight is not inputs:  # embeddings stay trainable if tied
                weight.requires_grad_(False)

    def forward(self, steps: TokenSteps) -> Tensor:
        """Compute values (N, longest, outputs) for the tokens of N answers, including padding positions."""
        compute = self.reader.compute
        with torch.autocast(self.head.weight.device.type, compute, enabled=compute in LOW):
            hidden = self.reader.states(steps)
        return self.head(hidden.to(self.head.weight.dtype))


def value_model(module: nn.Module) -> ValueModel:
    """Find the value model inside a module, which data parallelism may wrap."""
    return next(part for part in module.modules() if isinstance(part, ValueModel))


@register(copies_policy=True)
class Critic:
    """A critic for token policies: predicts the value of an answer before each of its tokens.

    The reference `second_model` trains it beside the policy. A linear layer, initialised to 0, maps last
    hidden states to values. All log-probabilities are 0. A checkpoint is the model's folder plus a file with
    this layer.

    Args:
        policy: The model and its training options, such as `{name: vision.tokens, model: ..., lora_rank:
            16}`. This model must be of the family of the run's policy. None: a copy of the run's policy.
        probability: Whether values are probabilities of success, 1/2 at the start. The layer then computes
            logits, which the objective `value_cross_entropy` trains (PAV's verifier, V_0).
    """

    outputs = frozenset({"value", "value_logit"})  # "value_logit" only with `probability`

    def __init__(self, *, policy: Callable[[], Tokens] | None = None, probability: bool = False) -> None:
        if policy is None:
            raise ConfigError("a critic needs a `policy`: the model that reads the answers")
        self.probability = probability
        if not probability:
            self.outputs = self.outputs - {"value_logit"}
        self.tokens = policy()
        self.module: nn.Module = ValueModel(self.tokens.module)

    @property
    def head(self) -> nn.Linear:
        """The linear layer that computes the values."""
        return value_model(self.module).head

    def check_steps_of(self, policy: Tokens) -> None:
        """Raise `ValueError` unless this model can read the policy's token ids and encoded images."""
        self.tokens.check_steps_of(policy)

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Encode a recorded answer as a row."""
        return self.tokens.encode(prompt, outcome)

    def collate(self, rollouts: Rollouts) -> Batch:
        """Collate rows to a padded batch."""
        return self.tokens.collate(rollouts)

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        logit = pad_to(self.module(batch.steps)[..., 0], batch.mask.shape[1], 1)
        outputs = {"value": logit.sigmoid() if self.probability else logit, "value_logit": logit}
        return StepOutput(torch.zeros_like(logit), {name: outputs[name] for name in outputs.keys() & extra})

    def save(self, folder: Path) -> None:
        """Write the model's folder, plus one file with the linear layer that computes the values."""
        from safetensors.torch import save_file

        self.tokens.save(folder)
        weights = {name: weight.detach().contiguous() for name, weight in self.head.named_parameters()}
        save_file(weights, folder / HEAD)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote, bit for bit."""
        from safetensors.torch import load_file

        self.tokens.load(folder)
        saved: dict[str, Any] = load_file(folder / HEAD)
        for name, weight in self.head.named_parameters():
            weight.copy_(saved[name])
