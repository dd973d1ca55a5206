"""Every file in configs/ is checked, and every variant takes two updates on a toy policy."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.build import build, check
from mmrl.cli import main
from mmrl.cli.check import check_file
from mmrl.config.binding import Pieces
from mmrl.config.loading import merge, read
from mmrl.config.registry import find
from mmrl.config.schema import Config, ConfigError, EvaluateConfig, as_piece, load, parse
from mmrl.config.stages import load_stages
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome
from mmrl.rewards.text import tag_format
from mmrl.training.loop import train
from mmrl.vision.benchmarks.time_spans import Moments, parse_saliency, parse_spans
from mmrl.vision.datasets.grounding import grounding
from tests.support.configs import METHODS, method_file, reads_scores
from tests.support.rules import rule
from tests.support.tables import assert_rows, loss_of, micro_batch, moved, reward_table
from tests.support.toy_flow import flow_plan
from tests.support.toys import plan, share_right

HOME = Path(__file__).parents[1]
CONFIGS = HOME / "configs"
VARIANTS = METHODS
RUNS = sorted(path for folder in ("train", "evaluate", "build") for path in (CONFIGS / folder).glob("*.yaml"))
SOURCE = re.compile(r"arXiv \d{4}\.\d{5}|\bTRL\b|\bverl\b|Williams 1992|\bUnpublished\b")


def each(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


# ---- files


@rule(RUNS + VARIANTS, lambda path: path.stem)
def test_every_file_resolves_its_names_and_options(path):
    check_file(path)


def test_the_command_passes_what_is_right_and_names_what_is_wrong(tmp_path, capsys):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("rollout: {num_generations: 2, engine: [offlin]}\n")
    assert main(["check", str(VARIANTS[0])]) == 0
    assert main(["check", str(VARIANTS[0]), str(wrong)]) == 2
    said = capsys.readouterr().out
    assert "did you mean 'offline'?" in said and "rollout.engine[0]" in said


@pytest.mark.parametrize(
    "text, message",
    [
        ("rollout: {num_generation: 2}", "rollout.num_generation'; did you mean 'num_generations'"),
        ("references: {ref: frozn}", "did you mean 'frozen'"),
        ("rollout: 3", "'rollout' must be a mapping, not 3"),
        (
            "objective: {name: policy_gradient, surrogate: clip, aggregation: step_mean, penalty: [k3]}",
            "'ref'",
        ),
    ],
)
def test_a_mistake_inside_a_variant_is_found_where_it_stands(tmp_path, text, message):
    (tmp_path / "variant.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_file(tmp_path / "variant.yaml")


@rule(VARIANTS, lambda path: path.stem)
def test_a_variant_is_short_and_names_its_source(path):
    lines = path.read_text().splitlines()
    settings = [line for line in lines if not line.startswith("#")]
    if not (1 <= len(settings) <= 8 and len(lines) <= 14 and max(map(len, lines)) <= 110):
        yield "keep to 8 lines of settings, 14 lines in all and 110 characters a line"
    head = " ".join(line for line in lines[:3] if line.startswith("#"))
    if not (lines[0].startswith("# ") and SOURCE.search(head)):
        yield "name the source (arXiv 0000.00000, TRL or verl) in a comment on the first three lines"


@rule(RUNS, lambda path: path.stem)
def test_a_run_begins_with_what_it_is(path):
    if not path.read_text().startswith("# "):
        yield "say in a comment on the first line what the run is"


@rule(VARIANTS, lambda path: path.stem)
def test_a_variant_fits_a_run_on_a_real_model(path):
    """Notes, tags, references and what the policy says are there, with the rewards of a grounding run, or of
    one that makes pictures, and with the run's engine, or one that holds conversations or plays games."""
    variant = read(path)
    run = PICTURES if "policy" in variant else read(CONFIGS / "train/charades_sta_grpo.yaml")
    if "guidance_scale" in variant.get("policy", {}):
        run = run | {"policy": {"name": "vision.tokens", "model": "somewhere"}}
    if reads_scores(variant):
        run = run | {"policy": {"name": "vision.reward_model", "model": "somewhere"}}
    chosen = {key: run[key] for key in ("policy", "data", "rewards", "rollout", "learn")}
    plain = variant.get("rollout", {}).get("engine", run["rollout"]["engine"])
    faults = []
    for engine in (plain, [*plain, TALKS], *([*plain, {"name": "play", "game": game}] for game in GAMES)):
        try:
            check(parse(merge(chosen, merge(variant, {"rollout": {"engine": engine}})), Config))
            return
        except ConfigError as error:
            faults.append(str(error))
            assert "reads the tag" in faults[-1], faults
    raise AssertionError(faults)


TALKS = {"name": "vision.with_tools", "tool": ["vision.crop"], "turn_outcomes": True}
GAMES = ("vision.spy", "vision.delegation")


PICTURES = {
    "policy": {"name": "diffusion.flow", "model": "somewhere"},
    "data": {"name": "diffusion.prompts", "path": "prompts.txt"},
    "rewards": [{"name": "precomputed", "key": "preferred"}],
    "rollout": {"num_prompts": 8, "engine": ["diffusion.denoise"]},
    "learn": {},
}


@pytest.mark.parametrize("name", ["charades_sta", "qvhighlights"])
def test_a_run_is_measured_as_its_evaluation_file_measures(name):
    alone = load(CONFIGS / f"evaluate/{name}.yaml", kind=EvaluateConfig)
    named = [path for path in RUNS if f"evaluate/{name}.yaml" in path.read_text()]
    runs = [path for path in named if "include" in path.read_text() and "rollout" in read(path)]
    assert runs
    for run in runs:  # of several stages the first: a later one may ask otherwise
        assert load_stages(run)[0].config.evaluation == alone.evaluation


def test_a_run_on_highlights_asks_in_training_what_it_asks_in_evaluation():
    run = load(CONFIGS / "train/qvhighlights_videochat_r1.yaml")
    asked = run.data.options["prompt"]
    assert asked == run.evaluation.data.options["prompt"]
    shown = asked.format(query="a dog")  # the form that the prompt shows is one that rewards can read
    assert parse_spans(shown) == [(10, 16), (40, 44)]
    assert parse_saliency(shown) == [(10, 2), (12, 4), (40, 3)]


def test_a_run_changes_one_item_of_a_list_by_its_number():
    run = load(CONFIGS / "train/charades_sta_tempsamp.yaml", ["rollout.engine.0.batch_size=128"])
    first, second = run.rollout.engine
    assert first.name == "vision.generate" and second.name == "with_demos"
    assert first.options == {"max_completion_length": 64, "batch_size": 128}
    form = load(CONFIGS / "train/activitynet_time_r1.yaml").rewards[0].options
    assert form == {"form": "iou", "reader": "time_r1"}


def test_a_row_without_a_span_is_a_prompt_without_a_demonstration_where_labels_are_not_wanted(tmp_path):
    options = load(CONFIGS / "train/unlabelled_urpa.yaml").data.options
    (tmp_path / "a.mp4").touch()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"video": "a.mp4", "query": "a dog", "duration": 8}')
    read_here = {**options, "path": str(rows), "root": str(tmp_path), "stream": Stream()}
    (prompt,) = grounding(**read_here)
    assert prompt.target == Moments((), 8.0) and not prompt.answers
    with pytest.raises(ValueError, match="it has no span"):
        grounding(**{**read_here, "unlabelled": False})


def test_a_demonstration_earns_the_advantage_of_1_that_supervised_tuning_wants(tmp_path):
    (tmp_path / "a.mp4").touch()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"video": "a.mp4", "query": "a dog", "duration": 10, "spans": [[1, 2.5]]}')
    here = {"path": str(rows), "root": str(tmp_path), "stream": Stream(), "demo_think": "empty"}
    prompts = [grounding(**here, reasoning=share)[0] for share in (0.0, 1.0)]
    demos = [prompt.answers[0] for prompt in prompts]
    assert [demo.text for demo in demos] == [
        "<answer> 1.00 to 2.50 </answer>",
        "<think></think> <answer> 1.00 to 2.50 </answer>",
    ]
    assert tag_format([Prompt("a", ())] * 2, demos) == [1.0, 1.0]


# ---- the worked numbers of the papers


def of_variant(name: str) -> dict[str, Any]:
    return read(method_file(name))


def chained(name: str, table: RewardTable) -> torch.Tensor:
    """Send a reward table through the chain of a variant."""
    for piece in of_variant(name)["advantage"]:
        table = Pieces(Stream()).make("advantage", as_piece(piece, ""))(table)
    return table.values[:, 0]


NO_KL = {"logp": [[-1.0]] * 4, "ref/logp": [[-1.0]] * 4}
HARD, EASY = [1, 0, 0, 0], [1, 1, 1, 0]
TWO_GROUPS = reward_table(HARD + EASY, group="aaaabbbb", length=[2, 1, 3, 1, 1, 2, 1, 4])
TWO_REWARDS = reward_table(
    {"right": [1, 1, 0, 0, 1, 0, 0, 0], "format": [1, 0, 1, 0, 0.5, 0.5, 0.5, 0]}, group="aaaabbbb"
)
DEMOS = reward_table({"iou": [0.3, 0.9], "tag_format": [1, 1]}, weights={"tag_format": 0.1})


@pytest.mark.parametrize(
    "name, table, wanted",
    [
        # (1 - 1/4) / (1/2 + 1e-4), and a third of it
        ("grpo", reward_table(HARD), [1.499700, *[-0.499900] * 3]),
        ("dr_grpo", reward_table(HARD), [0.75, *[-0.25] * 3]),
        ("rloo", reward_table(HARD, notes=NO_KL), [1.0, *[-1 / 3] * 3]),
        # the deviation of four ones and four zeros is sqrt(2/7)
        ("lite_ppo", TWO_GROUPS, [1.402859, *[-0.467620] * 3, *[0.467620] * 3, -1.402859]),
        # over the 15 steps the centred rewards have mean -.116667 and variance .266667
        (
            "reinforce_pp_baseline",
            TWO_GROUPS,
            [[1.678293] * 2, [-0.258199], *[[-0.258199]] * 2, *[[0.710047]] * 3, [-1.226445] * 4],
        ),
        ("gdpo", TWO_REWARDS, [1.224747, 0, 0, -1.224747, 1.414107, -0.000071, -0.000071, -1.413966]),
        ("asymre", reward_table([1, 0, 0, 1]), [0.6, -0.4, -0.4, 0.6]),  # baseline 1/2 - .1
        # the format as measured, whatever it and others weigh
        ("supervised", DEMOS, [1, 1]),
    ],
)  # fmt: skip
def test_a_chain_gives_the_worked_advantages(name, table, wanted):
    said = chained(name, table)
    assert_rows(said if isinstance(wanted[0], list) else said[:, 0], wanted)


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("tempsamp_r1", [-0.3496, 0.4159, -1.1956, 1.1293]),
        ("tempsamp_r1_downscale", [-0.3873, 0.3873, -1.1619, 1.1619]),
        ("tempsamp_r1_anchor", [0, 1, -1, 1.2]),
    ],
)
def test_the_three_forms_of_tempsamp_give_the_worked_advantages(name, wanted):
    table = reward_table({"temporal_iou": [0.6, 0.7, 0.5, 1.0]}, on_policy=[True, True, True, False])
    assert_rows(chained(name, table)[:, 0], wanted, tolerance=2e-3)  # worked out with another eps


def test_urpa_scales_advantages_by_confidence():
    # rewards 1 and 1/2 have the deviation sqrt(1/8): .25 / (.353553 + 1e-4), times the confidence of a half
    named = {"consensus_span": [1, 0], "span_confidence": [0.5, 0.5], "tag_format": [1, 1]}
    weights = {"consensus_span": 0.5, "span_confidence": 0.0, "tag_format": 0.5}
    assert_rows(chained("urpa", reward_table(named, weights=weights))[:, 0], [0.353453, -0.353453])


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("gdpo", -0.289241),  # clip, mean over steps and then rows
        ("lite_ppo", -0.439653),  # clip, mean over steps
        ("dapo", -0.455653),  # the third step may reach 1.28
        ("rloo", -0.4),  # whole answers: (-1.2 + .5 * .8) / 2
        ("gspo", -0.250275),  # both clipped: (-1.0004 + .5 * .9997) / 2
        ("gspo_token", -0.250275),
        ("luspo", -1.00475),  # (-3 * 1.0025 + 2 * .5 * .998) / 2
        ("cispo", 0.120605),  # (.552585 + .818731 + .269972 - .670320 - .367945) / 5
        ("sapo", -0.603311),
        ("asymre", 0.07),  # (.5 + 1 + .2 - 1 - .35) / 5
        ("opmd_kimi", 0.07605),  # and .1 * (.01 + .04 + .09 + .16 + .0025) / 5
    ],
)
def test_an_objective_gives_the_worked_loss(name, wanted):
    said = of_variant(name)["objective"]
    new, batch = micro_batch()
    loss = loss_of(new, batch, **{key: value for key, value in said.items() if key != "name"})
    assert_rows(loss[None], [wanted])


def test_dr_grpo_divides_by_rows_times_the_constant_length():
    said = of_variant("dr_grpo")["objective"]
    new, batch = micro_batch()
    loss = loss_of(new, batch, surrogate=said["surrogate"], aggregation=said["aggregation"])
    # the steps of the clipped losses sum to 5 * -.439653
    assert_rows(loss[None], [5 * -0.439653 / (2 * said["aggregation"]["max_completion_length"])])


@pytest.mark.parametrize("name, bounded", [("dual_clip", 3.0), ("two_sided_clip", 4.0), ("gdpo", 6.0)])
def test_a_bound_holds_where_a_bad_step_became_likely(name, bounded):
    said = of_variant(name)["objective"]
    new, batch = moved([[math.log(6.0)]], [-1.0])  # six times as likely, with the advantage -1
    assert_rows(loss_of(new, batch, **{k: v for k, v in said.items() if k != "name"})[None], [bounded])


def test_dapo_drops_groups_that_are_all_right_or_all_wrong_whatever_their_length():
    rewards = {"exact_match": [1, 1, 1, 0, 1, 0, 0, 0, 0], "overlong": [0, -0.5, -1] * 3}
    keep = Pieces(Stream()).make("group_filter", as_piece(of_variant("dapo")["group_filter"], ""))
    assert keep(reward_table(rewards, group="aaabbbccc")).tolist() == [False] * 3 + [True] * 3 + [False] * 3


@pytest.mark.parametrize("length, wanted", [(16384, 0.0), (18432, -0.5), (20480, -1.0), (20481, -1.0)])
def test_dapo_punishes_length_over_its_last_4096_steps(length, wanted):
    overlong = Pieces(Stream()).make("reward", as_piece(of_variant("dapo")["rewards"][1], ""))
    assert overlong([Prompt("a", ())], [Outcome("", end=length)]) == [wanted]


# ---- two updates


MEASURES = ("tests.support.toys:share_right", "tests.support.toys:brevity")
GENERATE = "tests.support.toys:ToyNoting"


def named_in(chain: list[Any]) -> list[str]:
    """List the rewards that a chain names."""
    named = (piece.get(key) for piece in chain if isinstance(piece, dict) for key in ("of", "right"))
    return list(dict.fromkeys(name for name in named if name))


def short_name(reward: dict[str, Any]) -> str:
    """Return the name of a reward without its package."""
    return reward["name"].rpartition(".")[2]


@per_outcome
def even(prompt: Prompt, outcome: Outcome) -> float:
    """Call about half of all answers right."""
    return float(sum(map(int, (outcome.text or "0").split())) % 2 == 0)


def mostly_right(prompts, outcomes) -> list[float]:
    """Give 1 to answers of which at least half is right."""
    return [float(share >= 0.5) for share in share_right(prompts, outcomes)]


def toy_rewards(variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Label toy rewards as the variant's own are, or as its chain names them."""
    if "branch_pairs" in variant["advantage"]:  # which needs answers that are right
        return [{"name": f"{__name__}:even"}]
    given = [{"name": r} if isinstance(r, str) else r for r in variant.get("rewards", [])]
    given = given or [{"name": name} for name in named_in(variant["advantage"])]
    kept = ("overlong",)  # reads nothing but lengths
    # Outcomes of `tiers` are whole, since its bonus must not reach from one to the next.
    whole = {piece["outcome"] for piece in variant["advantage"] if "outcome" in piece}
    return [
        reward
        if reward["name"] in kept
        else {
            "name": MEASURES[i % 2] if reward.get("weight", 1.0) else MEASURES[0],
            **({"name": f"{__name__}:mostly_right"} if short_name(reward) in whole else {}),
            "label": reward.get("label", short_name(reward)),
            "weight": reward.get("weight", 1.0),
            **{name: reward[name] for name in ("at",) if name in reward},
        }
        for i, reward in enumerate(given)
    ]


TOYS = {
    "diffusion.denoise": "tests.support.toy_flow:ToyDenoise",
    "diffusion.with_prefix_rollouts": "tests.support.toy_flow:ToyProbes",
    "diffusion.with_layers": "tests.support.toy_flow:ToyProbes",  # also several outcomes a row
    "offline": "offline",
}


def as_toy_flow(variant: dict[str, Any]) -> dict[str, Any]:
    """Put the flow in the plane and its engines in the places of real ones, with the options that they
    have."""
    likelihood = as_piece(variant["policy"]["likelihood"], "")
    kept = {name: value for name, value in likelihood.options.items() if name in ("draws", "segments")}
    kept["segments"] = min(kept.get("segments", 1), 2)  # a point in the plane has two coordinates
    policy = {
        "name": "tests.support.toy_flow:ToyFlow",
        "form": likelihood.name.removeprefix("diffusion."),
        **kept,
    }
    engine = []
    for piece in (as_piece(item, "") for item in variant["rollout"]["engine"]):
        options = {name: value for name, value in piece.options.items() if name == "one_step"}
        engine.append({"name": TOYS[piece.name], **options})
    return {**variant, "policy": policy, "rollout": {**variant["rollout"], "engine": engine}}


STAND_INS = {
    "vision.generate": GENERATE,
    "vision.generate_images": GENERATE,
    "vision.with_plans": "tests.support.observing:ToyThoughts",
    "vision.with_entropy_temperature": "tests.support.observing:ToyThoughts",
    "vision.with_window": "tests.support.toys:ToyWindow",
    "vision.with_think_region": "tests.support.observing:ToyThoughts",
    "vision.with_drafts": "tests.support.observing:ToyThoughts",  # the toys read no texts
    "vision.with_hint_reliance": "tests.support.observing:ToyThoughts",
    "vision.by_role": "tests.support.observing:ToyThoughts",  # nor have they adapters
    "vision.with_step_candidates": "tests.support.observing:ToyThoughts",  # nor do they call tools
    "vision.with_turn_branches": {"name": "vision.with_branches", "branching": [2, 2], "segment_length": 1},
}


def shortened(item: Any) -> Any:
    """Let the answers of an engine part after one token, of the four that a toy's answer has."""
    return {**item, "segment_length": 1} if "segment_length" in item else item


def on_a_toy(variant: dict[str, Any], output: Path, **changes: Any) -> Config:
    """Lay a variant over a toy run: the toy's engine makes what `vision.generate` would."""
    if "likelihood" in variant.get("policy", {}):
        return parse(merge(flow_plan(output), merge(as_toy_flow(variant), changes)), Config)
    variant = {k: v for k, v in variant.items() if k != "policy"}  # guidance, which a toy has not
    toy = {k: v for k, v in plan(output).items() if k not in ("advantage", "objective")}
    if "engine" in variant.get("rollout", {}):
        engine = [
            STAND_INS.get(as_piece(item, "").name) or shortened(item) for item in variant["rollout"]["engine"]
        ]
        size = min(variant["rollout"].get("num_generations", 4), 36)  # of 216 in a tree
        variant = merge(variant, {"rollout": {"engine": engine, "num_generations": size}})
        toy["policy"] = f"tests.support.toys:{'ToyScores' if reads_scores(variant) else 'ToyRecalling'}"
        toy["data"] = {
            "name": "tests.support.toys:prompts",
            "answers": variant["rollout"].get("num_generations", 1),
        }
    sampler = str(variant.get("sampler", ""))
    needs = [find("advantage", as_piece(item, "").name).needs for item in variant["advantage"]]
    reads = [need.notes for need in needs]
    if any(need.turns for need in needs) and "engine" not in variant.get("rollout", {}):
        toy = merge(toy, {"rollout": {"engine": ["tests.support.toys:ToyTurns"]}})
    if "hint_column" in sampler:
        toy["data"] = "tests.support.toys:hinted_prompts"
    elif "with_wordings" in sampler:
        toy["data"] = "tests.support.toys:worded_prompts"
    elif sampler or "token" in frozenset().union(*reads):  # a sampler may read sources and tokens
        support = "tests.support.observing"
        toy = merge(toy, {"data": f"{support}:sourced", "rollout": {"engine": [f"{support}:ToyTokens"]}})
    if "teacher" in str(variant.get("references")):  # which loads a model
        variant = {**variant, "references": {"teacher": "tests.support.toys:teacher"}}
    text = json.dumps(variant).replace("vision.critic", "tests.support.toys:ToyCritic")
    variant = json.loads(text)
    rewards = changes.pop("rewards", None) or toy_rewards(variant)
    raw = merge(merge(toy, variant), {"report": {"log_completions": False}, **changes})
    return parse({**raw, "rewards": rewards} if rewards else raw, Config)


@pytest.fixture
def no_page(monkeypatch):
    """Draw no curves: that takes longer than the run."""
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)


@each(VARIANTS)
def test_every_variant_takes_two_updates_that_move_the_policy(path, tmp_path, no_page):
    config = on_a_toy(read(path), tmp_path / "run", max_steps=2, learn={"num_iterations": 2})
    run = build(config, quiet=True)
    before = run.policy.table.detach().clone()
    train(run)
    steps = run.journal.read()
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps)
    assert torch.isfinite(run.policy.table).all()
    assert not torch.equal(run.policy.table, before)
