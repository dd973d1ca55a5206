"""One prompt, many answers: how rows of tokens are held, what they cost, and how a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmrl.config.schema import ConfigError
from mmrl.core.types import Unit
from mmrl.vision.decoding.prefill import axes, merge_media, pad_left, prefill
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder

PROMPT = -1  # owner of tokens that every answer sees
FORBIDDEN = -1e30  # a logit whose probability is 0 and whose product with it still is a number


class TokenPolicy(Protocol):
    """What an engine needs of a policy of tokens: its language, its model, and that without the head."""

    prompt_encoder: PromptEncoder
    model: nn.Module
    core: nn.Module
    compute: torch.dtype
    share_prefix: bool


@dataclass(frozen=True, eq=False)
class TokenRow:
    """How a row was made: its prompt as the model read it, its tokens, and the temperature they were drawn
    at."""

    prompt: EncodedPrompt
    ids: Tensor
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class TokenSteps:
    """Answers of `N` rows, `T` tokens each, and the distinct prompts they answer."""

    prompts: tuple[EncodedPrompt, ...]
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
    ids, mask, positions = pad_left([line for line, *_ in lines], device)
    size = ids.shape[1]
    owner, index = torch.full(ids.shape, -1), torch.zeros(ids.shape, dtype=torch.int64)
    where = torch.zeros(len(steps.ids), steps.longest, dtype=torch.int64)
    for i, (_, owners, places, starts) in enumerate(lines):
        first = size - len(owners)
        owner[i, first:], index[i, first:] = owners, places
        for row, start in starts.items():
            where[row] = first + start + torch.arange(steps.longest)
    hidden = core(
        input_ids=ids,
        attention_mask=_masks(windows(core.config), _sees(owner.to(device), mask.bool()), index.to(device)),
        use_cache=False,
        position_ids=axes(positions),
        **merge_media([prompt.media for prompt in steps.prompts], device),
    ).last_hidden_state
    return hidden[steps.which[:, None].to(device), where.clamp(max=size - 1).to(device)]


def windows(config: Any) -> dict[str, int | None]:
    """Find the types of a model's layers, and how many tokens each attends to with its own: None for all.

    Raises ConfigError where layers do something else than attend to the last tokens: they cannot be packed.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        chunked = getattr(text, "attention_chunk_size", None) is not None
        kinds = ["sliding_attention" if window else "chunked_attention" if chunked else "full_attention"]
    reach = {"full_attention": None, "sliding_attention": window}
    other = sorted(set(kinds) - set(reach))
    if other:
        raise ConfigError(
            f"`gradient_checkpointing` packs the answers of a prompt behind it, which layers of type "
            f"{', '.join(other)} of '{text.model_type}' cannot read; set `gradient_checkpointing: false`"
        )
    return {kind: reach[kind] for kind in sorted(set(kinds))}


def _masks(reach: dict[str, int | None], sees: Tensor, index: Tensor) -> Tensor | dict[str, Tensor]:
    """Make the mask (P, 1, S, S) of every type of layer, by its name, or the only one. `index` (P, S) is the
    place of a token in the sequence of its row."""
    ago = index[:, :, None] - index[:, None, :]
    masks = {
        kind: (sees if window is None else sees & (ago < window))[:, None] for kind, window in reach.items()
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _line(steps: TokenSteps, number: int) -> tuple[EncodedPrompt, Tensor, Tensor, dict[int, int]]:
    """Lay a prompt and its answers in a line: the line, the owner of every token (-1: all rows), its place in
    the sequence of its row, and where rows start.

    Every answer starts with the prompt's last token, which predicts its first.
    """
    prompt = steps.prompts[number]
    ids, positions, before = [prompt.ids[:-1]], [prompt.positions[:, :-1]], len(prompt.ids) - 1
    owners, places = [torch.full((before,), PROMPT)], [torch.arange(before)]
    starts, at = {}, before
    for row in (steps.which == number).nonzero()[:, 0].tolist():
        length = max(1, int(steps.length[row]))
        behind = (prompt.next_position + torch.arange(length - 1)).expand(len(prompt.positions), -1)
        ids.append(torch.cat([prompt.ids[-1:], steps.ids[row, : length - 1]]))
        positions.append(torch.cat([prompt.positions[:, -1:], behind], 1))
        owners.append(torch.full((length,), row))
        places.append(before + torch.arange(length))
        starts[row] = at
        at += length
    return (
        EncodedPrompt(prompt.uid, torch.cat(ids), torch.cat(positions, 1), prompt.media),
        torch.cat(owners),
        torch.cat(places),
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


def distinct_prompts(prompts: Sequence[EncodedPrompt]) -> tuple[tuple[EncodedPrompt, ...], Tensor]:
    """Find the distinct prompts of rows, and which one each row answers."""
    place = {id(prompt): i for i, prompt in enumerate({id(prompt): prompt for prompt in prompts}.values())}
    distinct = tuple({id(prompt): prompt for prompt in prompts}.values())
    return distinct, torch.tensor([place[id(prompt)] for prompt in prompts])
