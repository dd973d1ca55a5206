"""One prompt, many answers: how rows of tokens are held, what they cost, and how a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mmrl.types import Unit
from mmrl.vision.chat import Chat, Encoded
from mmrl.vision.prefill import axes, merge_media, pad_left, prefill

PROMPT = -1  # owner of tokens that every answer sees
FORBIDDEN = -1e30  # a logit whose probability is 0 and whose product with it still is a number


class Speaker(Protocol):
    """What an engine needs of a policy of tokens: its language, its model, and that without the head."""

    chat: Chat
    model: nn.Module
    core: nn.Module
    compute: torch.dtype
    share_prefix: bool


@dataclass(frozen=True, eq=False)
class TokenRow:
    """How a row was made: its prompt as the model read it, its tokens, and the temperature they were drawn
    at."""

    prompt: Encoded
    ids: Tensor
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class TokenSteps:
    """Answers of `N` rows, `T` tokens each, and the distinct prompts they answer."""

    prompts: tuple[Encoded, ...]
    which: Tensor  # (N,) the prompt of every row
    ids: Tensor  # (N, T)
    length: Tensor  # (N,)
    temperature: Tensor  # (N,) at which the row was sampled
    unit: Unit = Unit.ROW

    def cost(self, rows: Tensor) -> int:
        """Count tokens with padding: every distinct prompt once, every answer."""
        distinct = set(self.which[rows].tolist())
        longest = max(len(self.prompts[i].ids) for i in distinct)
        return len(distinct) * longest + len(rows) * int(self.length[rows].max())

    def __getitem__(self, cut: tuple[Tensor, slice]) -> TokenSteps:
        rows, columns = cut
        distinct, which = torch.unique(self.which[rows], return_inverse=True)
        prompts = tuple(self.prompts[i] for i in distinct.tolist())
        return TokenSteps(
            prompts, which, self.ids[rows][:, columns], self.length[rows], self.temperature[rows]
        )

    @property
    def longest(self) -> int:
        """Find the longest answer: columns behind it are empty."""
        return max(1, int(self.length.max()))


def read_cached(core: nn.Module, steps: TokenSteps, *, share_prefix: bool = True) -> Tensor:
    """Read prompts once and then all answers behind them: (N, longest, width) states that predict tokens."""
    device = core.get_input_embeddings().weight.device
    prefix = prefill(core, steps.prompts, share_prefix=share_prefix).select(steps.which.to(device))
    width = steps.longest
    ids = torch.cat([prefix.last[:, None], steps.ids[:, : width - 1].to(device)], 1)
    first, rest = prefix.positions[..., :1], prefix.positions[..., 1:]
    positions = torch.cat([first, rest + torch.arange(width - 1, device=device)], -1)
    return prefix.read(core, ids, positions)


def read_packed(core: nn.Module, steps: TokenSteps) -> Tensor:
    """Read every prompt with its answers behind it under one mask, without a cache, as gradient checkpointing
    needs it.

    An answer sees the prompt and itself. The result is that of `read_cached`; columns behind a row's end hold
    anything.
    """
    device = core.get_input_embeddings().weight.device
    lines = [_line(steps, i) for i in range(len(steps.prompts))]
    ids, mask, positions = pad_left([line for line, _, _ in lines], device)
    size = ids.shape[1]
    owner = torch.full(ids.shape, -1)
    where = torch.zeros(len(steps.ids), steps.longest, dtype=torch.int64)
    for i, (_, owners, starts) in enumerate(lines):
        owner[i, size - len(owners) :] = owners
        for row, start in starts.items():
            where[row] = size - len(owners) + start + torch.arange(steps.longest)
    hidden = core(
        input_ids=ids,
        attention_mask=_sees(owner.to(device), mask.bool())[:, None],
        use_cache=False,
        position_ids=axes(positions),
        **merge_media([prompt.media for prompt in steps.prompts], device),
    ).last_hidden_state
    return hidden[steps.which[:, None].to(device), where.clamp(max=size - 1).to(device)]


def _line(steps: TokenSteps, number: int) -> tuple[Encoded, Tensor, dict[int, int]]:
    """Lay a prompt and its answers in a line: the line, the owner of every token (-1: all rows), and where
    rows start.

    Every answer starts with the prompt's last token, which predicts its first.
    """
    prompt = steps.prompts[number]
    ids, positions = [prompt.ids[:-1]], [prompt.positions[:, :-1]]
    owners, starts, at = [torch.full((len(prompt.ids) - 1,), PROMPT)], {}, len(prompt.ids) - 1
    for row in (steps.which == number).nonzero()[:, 0].tolist():
        length = max(1, int(steps.length[row]))
        behind = (prompt.next_position + torch.arange(length - 1)).expand(len(prompt.positions), -1)
        ids.append(torch.cat([prompt.ids[-1:], steps.ids[row, : length - 1]]))
        positions.append(torch.cat([prompt.positions[:, -1:], behind], 1))
        owners.append(torch.full((length,), row))
        starts[row] = at
        at += length
    return (
        Encoded(prompt.uid, torch.cat(ids), torch.cat(positions, 1), prompt.media),
        torch.cat(owners),
        starts,
    )


def _sees(owner: Tensor, mask: Tensor) -> Tensor:
    """Tell which token sees which: (P, S) owners to (P, S, S). Earlier ones of the prompt or the same
    answer."""
    size = owner.shape[1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=owner.device).tril()
    same = (owner[:, :, None] == owner[:, None, :]) | (owner[:, None, :] == PROMPT)
    # A padded token sees itself, because a row of attention without any key is not a number.
    alone = torch.eye(size, dtype=torch.bool, device=owner.device) & ~mask[:, :, None]
    return (earlier & same & mask[:, None, :]) | alone


def distinct_prompts(prompts: Sequence[Encoded]) -> tuple[tuple[Encoded, ...], Tensor]:
    """Find the distinct prompts of rows, and which one each row answers."""
    place = {id(prompt): i for i, prompt in enumerate({id(prompt): prompt for prompt in prompts}.values())}
    distinct = tuple({id(prompt): prompt for prompt in prompts}.values())
    return distinct, torch.tensor([place[id(prompt)] for prompt in prompts])
