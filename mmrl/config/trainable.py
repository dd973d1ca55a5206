"""Check that a policy has trainable weights."""

from __future__ import annotations

from mmrl.config.loading import ConfigError
from mmrl.config.plain import as_list
from mmrl.config.registry import find
from mmrl.config.schema import Piece, as_piece


def check_trainable(policy: Piece, place: str = "policy") -> None:
    """Raise `ConfigError` if a transform leaves no weight of a policy to train.

    A transform declares `trains=False` if its result can be trained with an adapter only, or `trains=True` if
    it adds trained weights.
    """
    options = policy.options
    named = [as_piece(one, f"{place}.transform") for one in as_list(options.get("transform"))]
    trains = {piece.name: getattr(find("transform", piece.name).target, "trains", None) for piece in named}
    frozen = [name for name, value in trains.items() if value is False]
    adapted = any(options.get(name) for name in ("lora_rank", "adapter"))
    if frozen and not adapted and True not in trains.values():
        raise ConfigError(
            f"{place}.transform: '{frozen[0]}' makes weights that cannot be trained, and {place}.lora_rank "
            f"is 0, so nothing would learn; set for instance {place}.lora_rank=16"
        )
