"""Stop strings: end an answer as soon as its text contains a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.vision.models.processor import PromptEncoder

MARGIN = 4  # extra tokens to decode before a stop string: the first may lose a space or half a character
UNREADABLE = "\ufffd"


class StopStrings:
    """Detects answers whose text contains a stop string, like `stop_strings` of transformers.

    Only the latest tokens are decoded: every token that is not special has at least one byte, so a stop
    string of n bytes that the newest token completes spans at most n tokens. Raises ConfigError for strings
    that no answer can contain.
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
        """Create the search state of `num` answers that have no tokens yet."""
        return StopRows(self, num)

    def within(self, ids: Sequence[int]) -> bool:
        """Return whether the text of these tokens contains a stop string."""
        # Retry without the first token, which may begin inside a character and garble the text.
        for start in range(MARGIN):
            text = self.encoder.text(torch.tensor(ids[start:], dtype=torch.int64))
            if any(string in text for string in self.strings):
                return True
            if UNREADABLE not in text:
                return False
        return False


class StopRows:
    """State of the search for stop strings: the latest tokens of growing answers."""

    def __init__(self, stops: StopStrings, num: int) -> None:
        self.stops = stops
        self.latest: list[deque[int]] = [deque(maxlen=stops.size) for _ in range(num if stops.strings else 0)]

    def append(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Append one token to each of k rows; return a mask (k,) of rows that now contain a stop string."""
        stopped = torch.zeros_like(rows, dtype=torch.bool)
        if not self.latest:
            return stopped
        for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            if token not in self.stops.silent:
                self.latest[row].append(token)
                stopped[i] = self.stops.within(list(self.latest[row]))
                if stopped[i]:
                    self.latest[row].clear()  # do not detect it again in a continued answer
        return stopped

    def copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Copy the state of the rows `old` to the rows `new`."""
        for before, after in zip(old, new, strict=True) if self.latest else ():
            self.latest[after] = self.latest[before].copy()
