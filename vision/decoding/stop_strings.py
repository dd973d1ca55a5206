"""Strings that end an answer, found by its latest tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.vision.models.processor import PromptEncoder

MARGIN = 4  # tokens more than needed: decoders strip spaces, and cut characters, at the beginning of a text
UNREADABLE = "\ufffd"


class StopStrings:
    """Finds the answers whose text contains one of some strings (transformers' `stop_strings`).

    Only the latest tokens are decoded: one token at least gives a byte of the text, if it is not special, so
    an occurrence that a token completes has no more tokens than the string has bytes. Raises ConfigError for
    strings that no answer can contain.
    """

    def __init__(self, strings: Sequence[str], encoder: PromptEncoder) -> None:
        self.strings, self.encoder = tuple(strings), encoder
        self.silent = encoder.special_tokens() if self.strings else set()
        self.size = max((len(string.encode()) for string in self.strings), default=0) + MARGIN
        for string in self.strings:
            ids = encoder.tokenizer("x" + string, add_special_tokens=False)["input_ids"]
            if not string or string not in encoder.text(torch.tensor(ids)):
                raise ConfigError(
                    f"`stop_strings` has {string!r}, which the text of no answer contains: it is empty, or a "
                    "special token, or the tokenizer writes it otherwise; take it out of the list"
                )

    def rows(self, num: int) -> StopRows:
        """Begin with `num` empty answers."""
        return StopRows(self, num)

    def within(self, ids: Sequence[int]) -> bool:
        """Return whether the text of tokens contains one of the strings."""
        # Where the first character is cut, a decoder of bytes may give up on all that follow it.
        for start in range(MARGIN):
            text = self.encoder.text(torch.tensor(ids[start:], dtype=torch.int64))
            if any(string in text for string in self.strings):
                return True
            if UNREADABLE not in text:
                return False
        return False


class StopRows:
    """The latest tokens of growing answers."""

    def __init__(self, stops: StopStrings, num: int) -> None:
        self.stops = stops
        self.latest: list[deque[int]] = [deque(maxlen=stops.size) for _ in range(num if stops.strings else 0)]

    def append(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Append a token to some rows (k,); return which of them contain a string now, (k,) bool."""
        found = torch.zeros_like(rows, dtype=torch.bool)
        if not self.latest:
            return found
        for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            if token not in self.stops.silent:
                self.latest[row].append(token)
                found[i] = self.stops.within(list(self.latest[row]))
                if found[i]:
                    self.latest[row].clear()  # where an answer goes on, its next token finds it no more
        return found

    def copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Let new rows begin with what old ones have."""
        for before, after in zip(old, new, strict=True) if self.latest else ():
            self.latest[after] = self.latest[before].copy()
