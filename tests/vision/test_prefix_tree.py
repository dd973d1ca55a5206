"""Rows with common beginnings, computed once, against every row alone in plain transformers."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from mmrl.compression.transforms.visual_computation import drop_visual_layers
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Trajectory, Unit
from mmrl.papers.s_grpo import WithExits
from mmrl.papers.spo_tree import WithBranches
from mmrl.vision.decoding import prefix_tree, tree_reading
from mmrl.vision.decoding.prefill import merge_media
from mmrl.vision.decoding.prefix_tree import Line, Medium, find_tree
from mmrl.vision.decoding.token_steps import Suffix, TokenRow, TokenSteps
from mmrl.vision.engines.generate import Generate
from mmrl.vision.models.processor import EncodedPrompt
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
            **merge_media(policy.core, [prompt.media, suffix.media], torch.device("cpu")),
        ).logits[0, len(prompt.ids) - 1 + suffix.chosen]  # fmt: skip
        said = logits.index_fill(-1, hidden, -1e30).log_softmax(-1)
        found[i, : row.length] = said.gather(-1, steps.ids[:, None])[:, 0]
    return found.detach(), (found * weight).sum()


def weights(batch) -> torch.Tensor:
    """Weigh every step differently, so that no error in one can hide in another."""
    return (
        torch.linspace(0.5, 2.0, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape) * batch.mask
    )


def check(policy, rows, depth=3, *, tree=True):
    """Compare a batch with its rows alone: log-probabilities and gradients of all weights."""
    batch = policy.collate(tuple(rows))
    assert not tree or (len(batch.steps.tree.levels()) >= depth and batch.steps.cheaper_tree)
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
@pytest.mark.parametrize(("form", "seed"), [("cached", 0), ("packed", 1)])
def test_a_tree_says_and_learns_what_its_rows_do_alone(checkpoint, eager, family, form, seed):
    policy = precise(checkpoint(family), **OPTIONS[form])
    check(policy, forest(policy, family, seed))


@pytest.mark.parametrize(
    ("kind", "window", "form"),
    [("last", 4, "cached"), ("both", 20, "packed"), ("mistral", 9, "cached"), ("mistral", 9, "packed")],
)
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


# ---- what is found


def line(text: str, *media: Medium) -> Line:
    return Line(torch.tensor(list(map(ord, text))), torch.arange(len(text))[None], media)


def spelled(tree) -> list[str]:
    """Read rows from the nodes, laid side by side."""
    starts, text = [], ""
    for number in range(len(tree.nodes)):
        starts.append(len(text))
        text += "".join(map(chr, tree.ids(number).tolist()))
    return ["".join(text[i] for i in tree.places(row, starts).tolist()) for row in range(len(tree.lines))]


def beginnings(texts) -> int:
    return len({text[:end] for text in texts for end in range(1, len(text) + 1)})


@pytest.mark.parametrize("seed", range(30))
def test_every_beginning_has_one_node_and_rows_stay_in_their_order(eager, seed):
    draw = random.Random(seed)
    texts = ["".join(draw.choices("ab", k=draw.randrange(1, 9))) for _ in range(draw.randrange(1, 12))]
    tree = find_tree([line(text) for text in texts])
    assert spelled(tree) == texts
    assert tree.tokens == beginnings(texts)
    assert sorted(number for level in tree.levels() for number in level) == list(range(len(tree.nodes)))
    rows = draw.sample(range(len(texts)), draw.randrange(1, len(texts) + 1))
    some = tree.select(rows)
    assert spelled(some) == [texts[row] for row in rows]
    assert some.tokens == beginnings([texts[row] for row in rows])
    # Padding may be less where nodes were joined, never the tokens themselves.
    assert tree.cost(rows) >= some.tokens
    assert tree.cost(range(len(texts))) == sum(
        len(level) * max(len(tree.nodes[number]) for number in level) for level in tree.levels()
    )


def test_cost_counts_nodes_once_and_pads_those_of_one_depth(eager):
    tree = find_tree([line("abcdefgh"), line("abcdxy"), line("abcdx"), line("q")])
    assert tree.cost([0, 1, 2]) == 4 + 2 * 4  # abcd, then efgh beside xy
    assert tree.cost([0]) == 8 and tree.cost([2]) == 5
    assert tree.cost([0, 3]) == 2 * 4 + 4  # abcd beside q


def test_short_beginnings_are_left_to_rows_and_what_follows_them_is_still_found():
    long, chance = "l" * 100, "<think>"
    texts = [chance + long + end for end in ("a" * 50, "b" * 50)] + [chance + "z" * 50, "c" * 60]
    tree = find_tree([line(text) for text in texts])
    assert spelled(tree) == texts
    # Sharing "<think>" among two would save 7 tokens; 107 tokens are shared by the first two rows.
    assert sorted(map(len, tree.nodes)) == [50, 50, 57, 60, 107]
    assert find_tree([line("l" * 63 + end) for end in "ab"]).tokens == 128
    assert find_tree([line("l" * 64 + end) for end in "ab"]).tokens == 66
    rare = [line("l" * 64 + end * 700) for end in "ab"]
    assert find_tree(rare).tokens == 1528  # a twentieth of all tokens is more than 64


def test_rows_with_one_beginning_of_three_have_it_once_after_one_of_them_left(eager):
    tree = find_tree([line("abcd"), line("abxy"), line("abxz")])
    assert tree.tokens == 2 + 2 + 1 + 1 + 1
    two = tree.select([2, 1])
    assert [len(node) for node in two.nodes] == [3, 1, 1] and two.tokens == 5


def test_media_are_told_apart_by_what_they_show_and_never_cut(eager):
    one, same, other = ({"pixel_values": torch.tensor([float(x)])} for x in (1, 1, 2))
    texts = ["q<<<<a", "q<<<<b", "q<<<<a"]
    tree = find_tree([line(t, Medium(m, 1, 5)) for t, m in zip(texts, (one, same, other), strict=True)])
    assert sorted(map(len, tree.nodes)) == [1, 1, 1, 4, 5]
    assert [len(tree.media(number)) for number in range(len(tree.nodes))].count(1) == 2
    # Rows that part inside a video, between its frames, share what comes before it.
    parted = find_tree([line("qq<a<b", Medium(one, 2, 6)), line("qq<a<c", Medium(same, 2, 6))])
    assert sorted(map(len, parted.nodes)) == [2, 4, 4]


# ---- what is computed


def test_the_tower_sees_every_image_once(checkpoint, eager):
    policy = precise(checkpoint("qwen2_5_vl"))
    prompt = mixed.prompts("qwen2_5_vl")[1]
    rows = rows_per_turn(policy, prompt, random.Random(0))
    seen: list[int] = []
    tower = policy.core.visual
    hook = tower.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    policy(policy.collate(tuple(rows)))
    hook.remove()
    last = rows[-1].steps.prompt.media["image_grid_thw"]  # of the prompt, and of both turns that showed one
    assert sum(seen) == int(last.prod(-1).sum())


def test_usual_answers_have_no_tree(exact):
    policy = exact("qwen2_5_vl")
    rows = mixed.answered(policy, "qwen2_5_vl")
    assert policy.collate(rows).steps.tree is None
    encoded = policy.prompt_encoder.encode(mixed.prompts("qwen2_5_vl")[1])
    draw = random.Random(0)
    begun = [torch.tensor([30, 31, 32, *words(draw, 60, 70)]) for _ in range(8)]
    rows = [row_of(mixed.prompts("qwen2_5_vl")[1], TokenRow(encoded, ids)) for ids in begun]
    assert policy.collate(tuple(rows)).steps.tree is None  # three tokens of "<think>" are not worth it


def test_a_tree_whose_padding_takes_more_than_it_saves_is_not_read(eager):
    prompts, which, ids = [], [], []
    for kind, lengths in enumerate([(10, 1, 1), (1, 10, 1), (1, 1, 10)]):
        prompts.append(EncodedPrompt(f"p{kind}", torch.tensor([kind]), torch.zeros(1, 1).long(), {}))
        for second, third in product(range(2), repeat=2):  # parts of these lengths; the last is in two
            parts = ([kind] * lengths[0], [3 + second] * lengths[1], [5 + third] * lengths[2])
            ids.append(torch.tensor([*sum(parts, [])[1:], 9]))  # the first token is the prompt
            which.append(kind)
    length = torch.tensor([len(one) for one in ids])
    steps = TokenSteps(tuple(prompts), torch.tensor(which), torch.stack(ids), length, torch.ones(12))
    steps = steps.with_tree(None)
    assert steps.tree.tokens == (10 + 2 + 4) + (1 + 20 + 4) + (1 + 2 + 40)
    assert steps.tree.cost(range(12)) == (3 + 6 + 12) * 10
    assert steps.cost(torch.arange(12)) == 3 * 1 + 12 * 12 and steps.cheaper_tree is None
    some = steps[torch.arange(4), slice(None)]  # those of one prompt
    assert some.cost(torch.arange(4)) == 10 + 2 + 4 and some.cheaper_tree


def test_rows_of_one_beginning_may_differ_in_temperature(checkpoint, eager):
    policy = precise(checkpoint("llava"))
    prompt = mixed.prompts("llava")[0]
    encoded, ids = policy.prompt_encoder.encode(prompt), [torch.arange(30, 36), torch.arange(30, 40)]
    rows = [row_of(prompt, TokenRow(encoded, one, temperature)) for one in ids for temperature in (0.5, 1.0)]
    batch = policy.collate(tuple(rows))
    assert batch.steps.tree.tokens == len(encoded.ids) + 9
    logp = policy(batch).logp
    for i, row in enumerate(rows):
        single = policy(policy.collate((row,))).logp[0]
        torch.testing.assert_close(logp[i, : row.length], single, **TIGHT)
    assert (logp[0, :6] - logp[1, :6]).abs().max() > 1e-3
    first, each = batch.steps.distinct_steps(batch.mask.bool())
    assert len(first) == 20 and len(each) == 32


def test_models_that_choose_among_visual_tokens_read_rows_apart(checkpoint, eager):
    policy = Tokens(model=str(checkpoint("llava")), dtype="float64")  # a reader freezes what it shares
    pruned = drop_visual_layers(policy.model, after=1)
    rows = forest(policy, "llava", 4)
    batch = policy.collate(tuple(rows))
    reader = policy.reading_with(pruned, "float64")
    assert policy.module.reads_trees and not reader.reads_trees
    apart = replace(batch.steps, tree=None)
    with torch.no_grad():
        found, wanted = (reader(steps, frozenset())["logp"] for steps in (batch.steps, apart))
    torch.testing.assert_close(found, wanted, **TIGHT)


def test_an_attention_of_its_own_kind_reads_rows_apart(exact, eager, monkeypatch):
    policy = exact("llava")
    batch = policy.collate(tuple(forest(policy, "llava", 5)))
    with torch.no_grad():
        wanted = policy(batch).logp
        monkeypatch.setattr(tree_reading, "share_prefix", lambda *_: None)
        torch.testing.assert_close(policy(batch).logp, wanted, **TIGHT)


def test_what_engines_let_part_is_learned_as_a_tree(exact, eager, monkeypatch):
    policy = exact("llava")
    monkeypatch.setattr(policy.prompt_encoder, "end", [-2])  # all answers are as long as they may be
    prompt, stream = mixed.prompts("llava")[1], Stream(0)
    inner = Generate(policy, stream=stream, max_completion_length=6)
    trees = WithBranches(inner, stream=stream, branching=(2, 2), segment_length=2).rollout([prompt] * 8)
    exits = WithExits(inner, stream=stream, exit_text="0 1", max_exit_length=3).rollout([prompt] * 4)
    size = len(policy.prompt_encoder.encode(prompt).ids)
    for rows in (trees, exits):
        batch = policy.collate(rows)
        texts = {(*row.steps.ids.tolist()[:end],) for row in rows for end in range(1, row.length)}
        assert batch.steps.tree.tokens == size + len(texts)
        with torch.no_grad():
            logp = policy(batch).logp
        for i, row in enumerate(rows):
            chosen = batch.mask[i, : row.length] > 0
            noted = row.notes["logp"][chosen]
            torch.testing.assert_close(logp[i, : row.length][chosen].float(), noted, rtol=0, atol=2e-5)
