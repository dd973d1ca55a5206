"""Builder of codebooks for the cache `binary_codebook`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from mmrl.compression.contrib.codebook_calibration import calibrate_codebooks, write_codebooks
from mmrl.compression.fidelity import inputs_of
from mmrl.config.binding import Pieces
from mmrl.config.ranges import NonNegativeInt, PositiveInt, Range
from mmrl.config.registry import builder
from mmrl.config.schema import as_piece
from mmrl.core.rng import Stream
from mmrl.runtime.distributed import Processes
from mmrl.runtime.modules import evaluating


@builder
class CalibrateCodebook:
    """Fit the codebook of the cache `compression.binary_codebook` on prompts that a model answers.

    Use prompts that are similar to the prompts of later runs, but not the evaluation data. Prompts that the
    model has memorised show less clearly which errors matter. Reference answers are not read.

    Args:
        stream: Source of random numbers.
        model: The policy whose keys and values are quantised.
        prompts: Data set that provides the prompts.
        nbits: Bits per element of the keys, in (0, 8].
        value_nbits: Bits per element of the values; by default `nbits`.
        of: Tokens that the cache will quantise. `prompt`: the whole prompt. `visual`: its visual tokens.
        first: Number of tokens at the start of each prompt that the cache does not quantise.
        num_prompts: Number of prompts, evenly spaced in the data set.
        num_tokens: Maximum length of the greedy answers, in tokens.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        model: Mapping[str, Any],
        prompts: Mapping[str, Any],
        nbits: Annotated[float, Range(0, 16, above=True)] = 1.0,
        value_nbits: Annotated[float, Range(0, 16, above=True)] | None = None,
        of: Literal["prompt", "visual"] = "visual",
        first: NonNegativeInt = 8,
        num_prompts: PositiveInt = 400,
        num_tokens: PositiveInt = 24,
    ) -> None:
        self.model, self.prompts = as_piece(model, "build.model"), as_piece(prompts, "build.prompts")
        pieces = Pieces(Stream())  # only checks options; nothing is loaded
        pieces.check("policy", self.model, "build.model")
        pieces.check("data", self.prompts, "build.prompts")
        self.stream, self.num_prompts = stream, num_prompts
        self.options = {
            "nbits": nbits,
            "value_nbits": value_nbits,
            "of": of,
            "first": first,
            "num_tokens": num_tokens,
        }

    def build(self, output: Path) -> dict[str, Any]:
        """Write the codebooks to a file; return the number of prompts and the size of the file."""
        pieces = Pieces(self.stream)
        policy = pieces.make("policy", self.model, place="build.model")
        data = pieces.make("data", self.prompts, place="build.prompts")
        every = max(1, len(data) // (self.num_prompts or len(data)))
        chosen = [data[i] for i in range(0, len(data), every)][: self.num_prompts or None]
        device = Processes().device
        policy.module.to(device)
        inputs = inputs_of(policy.prompt_encoder, chosen, device)
        with evaluating(policy.model):
            generator = self.stream.fixed("calibrate_codebook")
            codebooks = calibrate_codebooks(policy.model, inputs, generator=generator, **self.options)
        output.mkdir(parents=True, exist_ok=True)
        path = output / "codebook.safetensors"
        write_codebooks(codebooks, path)
        return {"prompts": len(inputs), "bytes": path.stat().st_size}
