"""Memory of the KV cache of generation and of the step table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl.config.registry import find, memory_estimate
from mmrl.config.schema import Config
from mmrl.core.types import Prompt
from mmrl.kv_cache.hf_cache import head_size
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
    # Not every config has this; some have it as null or under an alias.
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    before = max((len(policy.prompt_encoder.encode(prompt).ids) for prompt in prompts), default=0)
    size = heads * head_size(text) * policy.compute.itemsize
    token = 2 * text.num_hidden_layers * size  # bytes; 2: keys and values
    others = 1 + len(config.references)  # log-probabilities of `old` and of each reference
    return {
        "cache": (options["batch_size"] or rows) * (before + longest) * token,  # 0: all rows at once
        "step table": 4 * rows * longest * (COLUMNS + others),  # float32
    }
