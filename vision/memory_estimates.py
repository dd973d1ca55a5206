"""Memory of the KV cache of generation and of the step table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl.config.registry import find, memory_estimate
from mmrl.config.schema import Config
from mmrl.core.types import Prompt
from mmrl.vision.models.loading import TokenPolicy

COLUMNS = 5  # mask, advantage, weight, and the engine's log-probability and entropy


@memory_estimate
def tokens(config: Config, policy: TokenPolicy, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Estimate the KV cache of the rows that are generated at once, unquantised, and the step table."""
    engine = config.rollout.engine[0]
    if engine.name != "vision.generate":
        return {}
    defaults = {name: p.default for name, p in find("engine", engine.name).options.items()}
    options = defaults | dict(engine.options)
    rows = config.rollout.num_prompts * config.rollout.num_generations
    longest = options["max_completion_length"]
    text = policy.model.config.get_text_config()
    # Not every config has these; some have them as null or under an alias.
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    before = max((len(policy.prompt_encoder.encode(prompt).ids) for prompt in prompts), default=0)
    token = 2 * text.num_hidden_layers * heads * size * policy.compute.itemsize  # bytes; 2: keys and values
    others = 1 + len(config.references)  # log-probabilities of `old` and of each reference
    return {
        "cache": (options["batch_size"] or rows) * (before + longest) * token,  # 0: all rows at once
        "step table": 4 * rows * longest * (COLUMNS + others),  # float32
    }
