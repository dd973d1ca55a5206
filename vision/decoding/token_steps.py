"""Batches of answers to shared prompts, and the two ways of running them through a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.schema import ConfigError
from mmrl.core.types import Unit
from mmrl.kv_cache.hf_cache import attention_types
from mmrl.vision.decoding.prefill import merge_media, pad_left, prefill, squeeze_axes
from mmrl.vision.models.processor import EncodedPrompt

PROMPT = -1  # owner of tokens that every answer attends to
# A logit of probability 0; unlike minus infinity, its product with that probability is finite.
FORBIDDEN = -1e30


@dataclass(frozen=True, eq=False)
class Suffix:
    """The tokens after the prompt of a conversation: those that the policy chose, and replies between them.

    `ids` (L,) end with a chosen token, rotary `positions` are (A, L), `chosen` (T,) are the indices of the
    policy's tokens, `media` are the tensors of the replies' images and videos.
    """

    ids: Tensor
    positions: Tensor
    chosen: Tensor
    media: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def answer(prompt: EncodedPrompt, ids: Tensor) -> Suffix:
        """Make the suffix of an answer (T,) without replies."""
        after = torch.arange(len(ids))
        return Suffix(ids, (prompt.next_position + after).expand(len(prompt.positions), -1), after)


@dataclass(frozen=True, eq=False)
class TokenRow:
    """The steps of one rollout: its encoded prompt, its tokens (T,), and the sampling temperature.

    `chosen` (T,) is False for tokens that an engine wrote into the answer, which are not learned; None: all
    are the policy's. In a conversation, `suffix` has the replies that stand between the tokens; they are no
    steps.
    """

    prompt: EncodedPrompt
    ids: Tensor
    temperature: float = 1.0
    chosen: Tensor | None = None
    suffix: Suffix | None = None

    @staticmethod
    def of_turns(turns: Sequence[tuple[EncodedPrompt, Tensor]], temperature: float = 1.0) -> TokenRow:
        """Make the row of a conversation from its turns: what the policy read, and the tokens it then chose.

        What is read in a turn starts with all of the turn before it, as `PromptEncoder.extend` makes it.
        """
        (prompt, _), (read, last) = turns[0], turns[-1]
        ids, before = torch.cat([ids for _, ids in turns]), len(prompt.ids)
        if len(turns) == 1:
            return TokenRow(prompt, ids, temperature)
        end = Suffix.answer(read, last)
        media = {name: value[len(prompt.media.get(name, ())) :] for name, value in read.media.items()}
        suffix = Suffix(
            torch.cat([read.ids[before:], last]),
            torch.cat([read.positions[:, before:], end.positions], 1),
            torch.cat([len(read.ids) - before + torch.arange(len(ids)) for read, ids in turns]),
            {name: value for name, value in media.items() if len(value)},
        )
        return TokenRow(prompt, ids, temperature, suffix=suffix)


@dataclass(frozen=True, eq=False)
class TokenSteps:
    """The steps of a batch: the answers of `N` rows, padded to `T` tokens, and their distinct prompts.

    `suffixes` (N) are those of the rows' conversations; it is empty where no row has one.
    """

    prompts: tuple[EncodedPrompt, ...]
    which: Tensor  # (N,) index of the prompt of every row
    ids: Tensor  # (N, T)
    length: Tensor  # (N,)
    temperature: Tensor  # (N,) sampling temperature
    suffixes: tuple[Suffix | None, ...] = ()
    unit: Unit = Unit.ROW

    def cost(self, rows: Tensor) -> int:
        """Count tokens with padding: every distinct prompt once, every answer with the replies inside it."""
        distinct = set(self.which[rows].tolist())
        longest = max(len(self.prompts[i].ids) for i in distinct)
        length = self.length[rows]
        if self.suffixes:
            length = torch.tensor([len(self.suffix(row).ids) for row in rows.tolist()])
        return len(distinct) * longest + len(rows) * int(length.max())

    def __getitem__(self, cut: tuple[Tensor, slice]) -> TokenSteps:
        rows, columns = cut
        distinct, which = torch.unique(self.which[rows], return_inverse=True)
        prompts = tuple(self.prompts[i] for i in distinct.tolist())
        kept = tuple(self.suffixes[row] for row in rows.tolist()) if self.suffixes else ()
        return TokenSteps(
            prompts,
            which,
            self.ids[rows][:, columns],
            self.length[rows],
            self.temperature[rows],
            kept if any(kept) else (),
        )

    @property
    def longest(self) -> int:
        """Length of the longest answer; later columns are padding."""
        return max(1, int(self.length.max()))

    def suffix(self, row: int) -> Suffix:
        """Get what follows the prompt in a row."""
        ids = self.ids[row, : int(self.length[row])]
        known = self.suffixes[row] if self.suffixes else None
        return known or Suffix.answer(self.prompts[int(self.which[row])], ids)

    @property
    def media(self) -> list[Mapping[str, Tensor]]:
        """The media tensors of prompts and of replies."""
        inside = [suffix.media for suffix in self.suffixes if suffix]
        return [*(prompt.media for prompt in self.prompts), *inside]


def distinct_prompts(prompts: Sequence[EncodedPrompt]) -> tuple[tuple[EncodedPrompt, ...], Tensor]:
    """Deduplicate prompts by identity: the distinct ones, and (N,) the index of every entry among them."""
    distinct = {id(prompt): prompt for prompt in prompts}
    place = {key: i for i, key in enumerate(distinct)}
    return tuple(distinct.values()), torch.tensor([place[id(prompt)] for prompt in prompts])


def read_cached(core: nn.Module, steps: TokenSteps, *, share_prefix: bool = True) -> Tensor:
    """Prefill the prompts, then run all answers: (N, longest, width) states, each predicting a token."""
    device = core.get_input_embeddings().weight.device
    prefix = prefill(core, steps.prompts, share_prefix=share_prefix).select(steps.which.to(device))
    # The inputs are shifted by one: the last token of the prompt predicts the first of the answer.
    if not steps.suffixes:
        return prefix.read(torch.cat([prefix.last[:, None], steps.ids[:, : steps.longest - 1].to(device)], 1))
    rows = [steps.suffix(row) for row in range(len(steps.ids))]

    def padded(sequences: list[Tensor]) -> Tensor:
        return pad_sequence(sequences, batch_first=True).to(device)

    ids, chosen = padded([row.ids for row in rows]), padded([row.chosen for row in rows])
    positions = padded([row.positions.T for row in rows]).permute(2, 0, 1)  # (A, N, L)
    hidden = prefix.read(
        torch.cat([prefix.last[:, None], ids[:, :-1]], 1),
        torch.cat([prefix.last_position[..., None], positions[..., :-1]], 2),
        merge_media([row.media for row in rows], device),
    )
    return hidden[torch.arange(len(rows), device=device)[:, None], chosen]


def read_packed(core: nn.Module, steps: TokenSteps) -> Tensor:
    """Run every prompt packed with all its answers in one sequence, without a cache.

    Gradient checkpointing needs it: a layer that is computed anew must not write to a cache again. The mask
    lets an answer attend to the prompt and to itself, so the result is that of `read_cached`; states after
    the end of a row are arbitrary.
    """
    device = core.get_input_embeddings().weight.device
    sequences, owners, indices = zip(*(_pack(steps, i) for i in range(len(steps.prompts))), strict=True)
    ids, mask, positions = pad_left(sequences, device)
    owner = pad_sequence(owners, batch_first=True, padding_value=PROMPT, padding_side="left")
    index = pad_sequence(indices, batch_first=True, padding_side="left")
    where = torch.zeros(len(steps.ids), steps.longest, dtype=torch.int64)  # 0 after the end of a row
    media: list[Mapping[str, Tensor]] = []  # in the order of the sequences' tokens
    for number, prompt in enumerate(steps.prompts):
        media.append(prompt.media)
        for row in (steps.which == number).nonzero()[:, 0].tolist():
            suffix, places = steps.suffix(row), (owner[number] == row).nonzero()[:, 0]
            where[row, : len(suffix.chosen)] = places[suffix.chosen]
            media.append(suffix.media)
    hidden = core(
        input_ids=ids,
        attention_mask=_masks(layer_windows(core.config), owner.to(device), index.to(device), mask.bool()),
        use_cache=False,
        position_ids=squeeze_axes(positions),
        **merge_media(media, device),
    ).last_hidden_state
    return hidden[steps.which[:, None].to(device), where.to(device)]


def _pack(steps: TokenSteps, number: int) -> tuple[EncodedPrompt, Tensor, Tensor]:
    """Concatenate a prompt and its answers, each of which starts with the prompt's last token.

    Returns the sequence, the owner of every token (a row or `PROMPT`), and its index in the unpacked sequence
    of that row.
    """
    prompt = steps.prompts[number]
    before = len(prompt.ids) - 1
    ids, positions = [prompt.ids[:-1]], [prompt.positions[:, :-1]]
    owners, indices = [torch.full((before,), PROMPT)], [torch.arange(before)]
    # prompt[:-1] | prompt[-1] answer_1[:-1] | prompt[-1] answer_2[:-1] | ...
    for row in (steps.which == number).nonzero()[:, 0].tolist():
        suffix = steps.suffix(row)
        length = max(1, len(suffix.ids))
        # The last token of an answer is predicted, but never an input.
        ids += [prompt.ids[-1:], suffix.ids[: length - 1]]
        positions += [prompt.positions[:, -1:], suffix.positions[:, : length - 1]]
        owners.append(torch.full((length,), row))
        indices.append(before + torch.arange(length))
    sequence = replace(prompt, ids=torch.cat(ids), positions=torch.cat(positions, 1))
    return sequence, torch.cat(owners), torch.cat(indices)


def _masks(
    windows: dict[str, int | None], owner: Tensor, index: Tensor, mask: Tensor
) -> Tensor | dict[str, Tensor]:
    """Make the attention mask (P, 1, S, S), by type of layer where there are several.

    Owners, indices and padding are (P, S). A token attends to earlier tokens of the prompt and of the same
    answer, within the window of the layer.
    """
    size = owner.shape[1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=owner.device).tril()
    # (P, S, S): query, key
    same = (owner[:, :, None] == owner[:, None, :]) | (owner[:, None, :] == PROMPT)
    # A padded token attends to itself: the softmax of a row without any key would be NaN.
    alone = torch.eye(size, dtype=torch.bool, device=owner.device) & ~mask[:, :, None]
    allowed = (earlier & same & mask[:, None, :]) | alone
    distance = index[:, :, None] - index[:, None, :]  # (P, S, S), as if each answer stood alone
    masks = {
        name: (allowed if window is None else allowed & (distance < window))[:, None]
        for name, window in windows.items()
    }
    return masks if len(masks) > 1 else masks.popitem()[1]


def layer_windows(config: Any) -> dict[str, int | None]:
    """Map the types of a model's layers to their attention windows in tokens; None: unlimited.

    Raises ConfigError for layers of other types than full and sliding attention: they cannot be packed.
    """
    text = config.get_text_config(decoder=True)
    types = attention_types(text)
    window = text.sliding_window if "sliding_attention" in types else None
    windows = {"full_attention": None, "sliding_attention": window}
    if other := [name for name in types if name not in windows]:
        raise ConfigError(
            f"`gradient_checkpointing` packs the answers of a prompt after it, which layers of type "
            f"{', '.join(other)} of '{text.model_type}' cannot read; set `gradient_checkpointing: false`"
        )
    return {name: windows[name] for name in types}
