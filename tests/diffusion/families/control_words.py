"""Check that words of a text make no control token of any text encoder."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch

from mmrl.diffusion.model_family import Request, family_of, reading_words


def check_control_words(pipe: Any, request: Request, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode texts that hold the control words of the pipeline's tokenizers, and count control tokens."""
    family = family_of(type(pipe).__name__)
    tokenizers = {key: part for key, part in pipe.components.items() if hasattr(part, "added_tokens_decoder")}
    special = {number for part in tokenizers.values() for number in part.all_special_ids}
    read: list[list[int]] = []  # the tokens that text encoders were given
    for tower in (part for key, part in pipe.components.items() if key.startswith("text_encoder") and part):
        forward = tower.forward

        def noted(*ids, forward=forward, **options):
            read.append((ids[0] if ids else options["input_ids"])[0].tolist())
            return forward(*ids, **options)

        monkeypatch.setattr(tower, "forward", noted)

    def control(text: str) -> list[int]:
        read.clear()
        with torch.no_grad(), reading_words(pipe, text) as words:
            family.encode(pipe, [replace(request, text=words)], limit)
        assert {key: pipe.components[key] for key in tokenizers} == tokenizers  # as they were
        # Padding is one token many times.
        return [sum(token in special for token, _ in groupby(ids)) for ids in read]

    for word in sorted({word for part in tokenizers.values() for word in part.all_special_tokens}):
        plain = f"a{'x' * len(word)}b"  # as long, so that both are padded or none
        assert control(f"a{word}b") == control(plain), word
