"""The model family of CogView4 (https://github.com/THUDM/CogView4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.registry import family
from mmrl.diffusion.model_family import Condition, PipelineFamily, Request, check_fits, per_text
from mmrl.diffusion.schedule import scheduled_times
from mmrl.diffusion.staged_network import meets, most_calls

# Unsupported scheduler settings, whose time shift cannot be inverted.
OTHER_SCHEDULES = (
    "invert_sigmas", "shift_terminal", "use_beta_sigmas", "use_exponential_sigmas", "use_karras_sigmas"
)  # fmt: skip


@family
class CogView4(PipelineFamily):
    """CogView4: GLM-4 reads the text, padded on the left to a multiple of 16 tokens, without a mask.

    The network takes times before the scheduler's shift, which are recovered here from sigma. It also takes
    the size in pixels, as the original and as the target size; crops are zero. It has no working mask for
    texts, so texts of different lengths run through it in separate calls. Every text is padded alone; in the
    pipeline, the padding, and so the image, depends on the other texts of a batch.
    """

    pipelines = frozenset({"CogView4Pipeline"})
    targets = ("attn1.to_k", "attn1.to_out.0", "attn1.to_q", "attn1.to_v")

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if GLM-4 would truncate a text."""
        check_fits(pipe.tokenizer, text, max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts: hidden states (tokens, D), the time-shift rule (3,), and pixels per latent ()."""
        settings = {
            "time_shift": time_shift(pipe.scheduler),
            "pixels_per_latent": torch.tensor(pipe.vae_scale_factor),
        }
        conditions = []
        for request in requests:
            self.check_text(pipe, request.text, max_sequence_length)
            states, _ = pipe.encode_prompt(
                [request.text], do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
            )
            conditions += [one | settings for one in per_text(encoder_hidden_states=states)]
        return conditions

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions: hidden states (B, tokens, D), padded on the left, and text lengths (B,)."""
        texts = [condition["encoder_hidden_states"] for condition in conditions]
        others = [
            {name: value for name, value in condition.items() if name != "encoder_hidden_states"}
            for condition in conditions
        ]
        return super().stack(others) | {
            "encoder_hidden_states": pad_sequence(texts, batch_first=True, padding_side="left"),
            "length": torch.tensor([len(text) for text in texts]),
        }

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities, with a separate network call for each text length."""
        lengths = condition["length"]
        groups = [(length, (lengths == length).nonzero()[:, 0]) for length in lengths.unique().tolist()]
        # Calls of a sharded network are collective, so all processes must make the same number.
        idle = most_calls(len(groups), latents.device) - len(groups) if meets(network) else 0
        velocities = []
        for length, rows in groups + groups[:1] * idle:
            part = {name: value[rows] for name, value in condition.items()}
            part["encoder_hidden_states"] = part["encoder_hidden_states"][:, -length:]
            velocities.append(self._velocity(network, latents[rows], sigma[rows], part))
        order = torch.cat([rows for _, rows in groups]).argsort()
        spare = sum(one.flatten()[:0].sum() for one in velocities[len(groups) :])
        return torch.cat(velocities[: len(groups)])[order] + spare

    def _velocity(self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict velocities of rows whose texts have the same length."""
        height, width = latents.shape[-2:]
        pixels = condition["pixels_per_latent"][:, None] * sigma.new_tensor([[height, width]])  # (B, 2)
        slope, offset, exponential = condition["time_shift"].unbind(1)
        mu = offset + slope * math.sqrt(height * width // network.config.patch_size**2)
        shift, sigma = torch.where(exponential > 0, mu.exp(), mu), sigma.double()
        # The inverse of the shift t -> shift t / (shift t + 1 - t).
        time = 1000 * sigma / (sigma + shift * (1 - sigma))
        return network(
            hidden_states=latents.to(network.dtype),
            encoder_hidden_states=condition["encoder_hidden_states"].to(network.dtype),
            timestep=time.to(pixels),
            original_size=pixels,
            target_size=pixels,
            crop_coords=torch.zeros_like(pixels),
            return_dict=False,
        )[0]

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space integer timesteps evenly from 1000 to 1, and shift them for the number of image tokens."""
        import numpy as np

        slope, offset, _ = time_shift(pipe.scheduler).tolist()
        tokens = math.prod(shape[1:]) // pipe.transformer.config.patch_size**2
        even = torch.from_numpy(np.linspace(1000, 1, num_steps).astype(np.int64)) / 1000
        return scheduled_times(pipe.scheduler, num_steps, sigmas=even, mu=offset + slope * math.sqrt(tokens))


def time_shift(scheduler: Any) -> Tensor:
    """Return a scheduler's time-shift rule: slope, offset, and whether exponential, (3,) float64.

    The shift is `offset + slope sqrt(tokens)`, or the exponential of this number.
    """
    settings = scheduler.config
    if wrong := [name for name in OTHER_SCHEDULES if settings.get(name)]:
        raise ValueError(
            f"the scheduler sets `{wrong[0]}`, but CogView4 reads times before their shift, which cannot be "
            "recovered then; give the pipeline a FlowMatchEulerDiscreteScheduler without this setting"
        )
    if not settings.get("use_dynamic_shifting", False):
        return torch.tensor([0.0, settings.get("shift", 1.0), 0.0], dtype=torch.float64)
    slope = settings.get("max_shift", 0.75) / math.sqrt(settings.get("base_image_seq_len", 256))
    exponential = settings.get("time_shift_type", "exponential") == "exponential"
    return torch.tensor([slope, settings.get("base_shift", 0.25), exponential], dtype=torch.float64)
