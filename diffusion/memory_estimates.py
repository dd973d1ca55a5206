"""Memory of text encoders, image decoder, and the sampling paths of images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mmrl.config.registry import find, memory_estimate
from mmrl.config.schema import Config
from mmrl.core.types import Prompt
from mmrl.diffusion.steps import FlowPolicy


@memory_estimate
def paths(config: Config, policy: FlowPolicy, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Bytes of encoders and decoder, and of the latents of all steps of a collection."""
    sizes = {"encoders and decoder": policy.frozen.device_bytes()}
    engine = config.rollout.engine[0]  # the innermost engine
    if engine.name != "diffusion.denoise":
        return sizes
    defaults = {name: p.default for name, p in find("engine", engine.name).options.items()}
    options = defaults | dict(engine.options)
    shape = policy.family.latent_shape(
        policy.pipe, options["height"], options["width"], options["num_frames"]
    )
    rows = config.rollout.num_prompts * config.rollout.num_generations
    # The path has the start and every step; without a solver only the end is stored.
    states = 1 + (options["num_inference_steps"] if options["solver"] else 0)
    return {**sizes, "paths": rows * states * math.prod(shape) * policy.precision.itemsize}
