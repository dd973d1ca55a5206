"""Books for the cache `binary_codebook`, fitted on prompts of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from mmrl.compression.contrib.codebook_calibration import make_books, write_books
from mmrl.config.binding import Pieces
from mmrl.config.ranges import NonNegativeInt, PositiveInt, Range
from mmrl.config.registry import builder
from mmrl.config.schema import as_piece
from mmrl.core.rng import Stream
from mmrl.runtime.distributed import Processes
from mmrl.runtime.modules import evaluating


@builder
class CalibrateCodebook:
    """Fit the vectors of `compression.binary_codebook` on prompts that a model answers, for its option
    `book`.

    `model` is a policy, `prompts` are data, of which `num_prompts` are taken, evenly spaced (0: all). Their
    answers are not read. Take prompts like those that will come; ones that the model has learned by heart may
    say less of which errors matter, and ones it is measured on are out of bounds. `nbits` and `value_nbits`
    are bits a number of keys and of values; `of` says what the cache will hold in bits, and `first` how many
    tokens of a prompt never are.
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
        pieces = Pieces(Stream())
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
        """Write the books, and tell how many prompts they come from."""
        pieces = Pieces(self.stream)
        policy = pieces.make("policy", self.model, place="build.model")
        data = pieces.make("data", self.prompts, place="build.prompts")
        every = max(1, len(data) // (self.num_prompts or len(data)))
        asked = [data[i] for i in range(0, len(data), every)][: self.num_prompts or None]
        device = Processes().device
        policy.module.to(device)
        inputs = []
        for encoded in map(policy.prompt_encoder.encode, asked):
            positions = encoded.positions[:, None] if len(encoded.positions) > 1 else encoded.positions
            given = {"input_ids": encoded.ids[None], "position_ids": positions, **encoded.media}
            inputs.append({name: x.to(device) for name, x in given.items()})
        with evaluating(policy.model):
            draw = self.stream.fixed("calibrate_codebook")
            books = make_books(policy.model, inputs, generator=draw, **self.options)
        output.mkdir(parents=True, exist_ok=True)
        path = output / "book.safetensors"
        write_books(books, path)
        return {"prompts": len(inputs), "bytes": path.stat().st_size}
