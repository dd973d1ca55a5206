"""Rows with common beginnings, computed once, against every row alone in plain transformers."""

from __future__ import annotations

import random

import pytest
import torch

from mmrl.core.types import Message, Outcome, Part, Trajectory, Unit
from mmrl.vision.decoding import prefix_tree
from mmrl.vision.decoding.prefill import merge_media
from mmrl.vision.decoding.token_steps import Suffix, TokenRow
from mmrl.vision.policies.tokens import Tokens
from tests.kv_cache.test_prefix import Norm
from tests.vision import mixed, tiny
from tests.vision.test_sliding_windows import sliding

FAMILIES = ("qwen2_5_vl", "llava")
MORE = ("qwen2_vl", "qwen3_vl", "llava_onevision", "smolvlm", "internvl")
EVERY = pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in MORE)]
)
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture
def eager(monkeypatch):
    """Share every beginning, however short."""
    monkeypatch.setattr(prefix_tree, "SAVED", 1)
    monkeypatch.setattr(prefix_tree, "GAIN", 0.0)


def precise(folder, **options) -> Tokens:
    """Load a policy whose norms compute in float64 as well: those of transformers round to float32."""
    policy = Tokens(model=str(folder), dtype="float64", **options)
    for parent in list(policy.model.modules()):
        for name, module in list(parent.named_children()):
            if hasattr(module, "variance_epsilon"):
                setattr(parent, name, Norm(module))
    return policy


def row_of(prompt, steps) -> Trajectory:
    return Trajectory(prompt, prompt.uid, (Outcome(end=len(steps.ids)),), steps, len(steps.ids))


def words(draw, low=1, high=6) -> list[int]:
    return [draw.randrange(20, 200) for _ in range(draw.randrange(low, high))]


def branches(draw, depth=3) -> list[list[int]]:
    """Make answers that part from each other, at uneven places."""
    stem = words(draw)
    if not depth:
        return [stem]
    return [stem + rest for _ in range(draw.randrange(1, 4)) for rest in branches(draw, depth - 1)]


def says(*parts) -> Message:
    return Message("user", tuple(Part(part) if isinstance(part, str) else Part(media=part) for part in parts))


def rows_per_turn(policy, prompt, draw, turns=3) -> list[Trajectory]:
    """Hold a conversation whose turns are rows, and end it in two ways."""
    encoder, rows = policy.prompt_encoder, []
    read = encoder.encode(prompt)
    for turn in range(turns):
        ids = torch.tensor(words(draw))
        rows.append(row_of(prompt, TokenRow(read, ids)))
        picture = [tiny.picture(seed=draw.randrange(3), width=draw.choice((28, 56)))] * (turn != 1)
        read = encoder.extend(read, ids, says("look", *picture, "fox"))
    return [*rows, *(row_of(prompt, TokenRow(read, torch.tensor(words(draw)))) for _ in range(2))]


def conversations(policy, prompt, draw) -> list[Trajectory]:
    """Hold conversations of one row each, which begin with the same turn and the same image."""
    encoder = policy.prompt_encoder
    read, first = encoder.encode(prompt), torch.tensor(words(draw, 3))
    then = encoder.extend(read, first, says("see", tiny.picture(seed=7)))
    found = []
    for ids in branches(draw, 1):
        later = encoder.extend(then, torch.tensor(ids), says("and", tiny.picture(seed=draw.randrange(2))))
        turns = [(read, first), (then, torch.tensor(ids)), (later, torch.tensor(words(draw)))]
        found.append(row_of(prompt, TokenRow.of_turns(turns)))
    return found


def forest(policy, family, seed) -> list[Trajectory]:
    """Make rows of all kinds for several prompts, in any order."""
    draw, prompts = random.Random(seed), mixed.prompts(family)
    rows = rows_per_turn(policy, prompts[1], draw)
    for prompt in (prompts[0], prompts[-1]):
        encoded = policy.prompt_encoder.encode(prompt)
        rows += [row_of(prompt, TokenRow(encoded, torch.tensor(ids))) for ids in branches(draw, 2)]
    rows += conversations(policy, prompts[2], draw)
    draw.shuffle(rows)
    return rows


def alone(policy, rows, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probabilities (N, T) and the weighed sum by one pass of transformers per row."""
    found = torch.zeros(weight.shape, dtype=torch.float64)
    hidden = torch.tensor(policy.prompt_encoder.placeholders)
    for i, row in enumerate(rows):
        prompt, steps = row.steps.prompt, row.steps
        suffix = steps.suffix or Suffix.answer(prompt, steps.ids)
        positions = torch.cat([prompt.positions, suffix.positions], 1)[:, None]
        logits = policy.model(
            input_ids=torch.cat([prompt.ids, suffix.ids])[None], use_cache=False,
            position_ids=positions[0] if len(positions) == 1 else positions,
            **merge_media([prompt.media, suffix.media], torch.device("cpu")),
        ).logits[0, len(prompt.ids) - 1 + suffix.chosen]  # fmt: skip
        said = logits.index_fill(-1, hidden, -1e30).log_softmax(-1)
        found[i, : row.length] = said.gather(-1, steps.ids[:, None])[:, 0]
    return found.detach(), (found * weight).sum()


def weights(batch) -> torch.Tensor:
    """Weigh every step differently, so that no error in one can hide in another."""
    return (
        torch.linspace(0.5, 2.0, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape) * batch.mask
    )


def check(policy, rows, depth=3):
    """Compare a batch with its rows alone: log-probabilities and gradients of all weights."""
    batch = policy.collate(tuple(rows))
    assert len(batch.steps.tree.levels()) >= depth
    weight = weights(batch)
    logp = policy(batch).logp * batch.mask
    (logp * weight).sum().backward()
    found = mixed.gradients(policy)
    wanted, loss = alone(policy, rows, weight)
    torch.testing.assert_close(logp.detach(), wanted, **TIGHT)
    loss.backward()
    gradients = mixed.gradients(policy)
    assert found.keys() == gradients.keys()
    for name, value in gradients.items():
        # Towers turn their queries and keys in float32.
        atol = 1e-6 if "visi" in name or "visual" in name else 1e-10
        torch.testing.assert_close(found[name], value, rtol=atol, atol=atol, msg=lambda m, n=name: n + m)
    return batch


OPTIONS = {
    "cached": {"freeze_vision_tower": False},
    "packed": {"freeze_vision_tower": False, "gradient_checkpointing": True},
}


@EVERY
@pytest.mark.parametrize("form", OPTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tree_says_and_learns_what_its_rows_do_alone(checkpoint, eager, family, form, seed):
    policy = precise(checkpoint(family), **OPTIONS[form])
    check(policy, forest(policy, family, seed))


@pytest.mark.parametrize("form", OPTIONS)
@pytest.mark.parametrize(("kind", "window"), [("last", 4), ("both", 20), ("mistral", 9)])
def test_windows_reach_back_in_the_own_sequence_of_a_row(checkpoint, tmp_path, eager, kind, window, form):
    family, folder = sliding(checkpoint, kind, window, tmp_path / "model")
    policy = precise(folder, **OPTIONS[form])
    check(policy, forest(policy, family, seed=window))


def test_every_micro_batch_cut_gives_the_same_gradient(checkpoint, eager):
    policy = precise(checkpoint("qwen2_5_vl"))
    batch = policy.collate(tuple(forest(policy, "qwen2_5_vl", 2)))
    batch = batch.replace(weight=weights(batch), group=torch.arange(len(batch)) // 3)

    def gradient(budget):
        parts = batch.split(budget, Unit.ROW)
        for part in parts:
            (policy(part).logp * part.weight).sum().backward()
        return len(parts), mixed.gradients(policy)

    (_, whole), sizes = gradient(1 << 20), set()
    for budget in (1, 60, 150, 400):
        number, found = gradient(budget)
        sizes.add(number)
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, **TIGHT, msg=lambda m, n=name: n + m)
    assert len(sizes) == 4 and max(sizes) == len(batch)
