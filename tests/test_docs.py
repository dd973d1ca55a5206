"""README and docs are true: every block runs, every command exists, the site builds without a warning."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl.api.configuration import configuration
from mmrl.build import build, check, make_chain
from mmrl.config import schema
from mmrl.config.loading import read
from mmrl.config.registry import HOMES, find
from mmrl.config.schema import Config, as_plain, parse
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.media_reader import MediaReader
from mmrl.reporting.methods import Method, comment_of
from mmrl.training.loop import train
from tests import test_configs as configs
from tests import test_contracts as contracts
from tests import test_pieces_documented as documented
from tests.config import test_ranges as ranges
from tests.config import test_registry as registry
from tests.diagnostics.test_doctor import MISTAKES
from tests.support.configs import library_pieces
from tests.support.doc_blocks import (
    PAGES,
    ROOT,
    Block,
    Untrue,
    blocks_of,
    check_inline,
    folder_of,
    inline_commands,
    make_targets,
    run,
)  # fmt: skip
from tests.support.rules import piece_name, violations
from tests.support.tables import reward_table
from tests.support.toy_flow import flow_plan
from tests.support.toys import plan

README = (ROOT / "README.md").read_text()
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
BLOCKS = {page: blocks_of(text, page) for page, text in TEXTS.items()}
EVERY = [block for blocks in BLOCKS.values() for block in blocks]


# ---- blocks


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Stand in the reader's folder. Real checkpoints are checked, and a toy takes their place."""
    load = schema.load

    def checked(path, overrides=(), kind=Config):
        check(load(path, overrides, kind))
        toy = plan(tmp_path / "run", max_steps=2, evaluation={"data": "tests.support.toys:prompts"})
        return parse(toy, Config)

    def toy_chain(pieces, kind, listed, first, place):
        toy = parse(plan(tmp_path / "engine"), Config)
        return (
            make_chain(pieces, kind, listed, first, place) if first else build(toy, quiet=True).method.engine
        )

    def configured(*given, **named):
        real = configuration(*given, **named)
        check(real)
        kept = {name: getattr(real, name) for name in ("eval_steps", "save_steps", "metric_for_best_model")}
        toy = {**plan(tmp_path / "run"), "evaluation": {"data": "tests.support.toys:prompts"}}
        return replace(checked(toy), **kept)

    monkeypatch.setattr("mmrl.api.trainer.configuration", configured)
    monkeypatch.setattr("mmrl.config.schema.load", checked)
    monkeypatch.setattr("mmrl.build._load_policy", lambda *given: None)
    monkeypatch.setattr("mmrl.build.make_chain", toy_chain)
    monkeypatch.setattr("mmrl.inference.session.no_media", MediaReader())  # toys are shown images and videos
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", EVERY, ids=lambda block: block.name)
def test_a_block_runs(block, reader):
    with folder_of(BLOCKS[block.page], reader):
        run(block, reader)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("", "something\n", "nobody knows how to run a block of kind ''"),
        ("bash", "mmrl env\n", "kind 'bash'; use python, yaml, sh"),
        ("python", "from mmrl.training.loop import tarin\n", "cannot import name 'tarin'"),
        ("python", "assert 1 + 1 == 3\n", "AssertionError"),
        ("python", "# broken.py\ndef f(:\n", "SyntaxError"),
        ("jsonl", '{"question": "a", answer: "b"}\n', "JSONDecodeError"),
        ("yaml", "rewards: [vision.temporal_iuo]\n", "did you mean 'vision.temporal_iou'"),
        ("yaml", "policy: {name: vision.tokens, model: x, lora_rnk: 3}\n", "did you mean 'lora_rank'"),
        ("yaml", "learn: {learning_rat: 1}\n", "did you mean 'learning_rate'"),
        ("yaml", "include: [variants/no_such.yaml]\n", "there is no file"),
        ("sh", "mmrl trian examples/video_grounding/grpo.yaml\n", "SystemExit"),
        ("sh", "mmrl train no_such.yaml\n", "there is no file 'no_such.yaml'"),
        (
            "sh",
            "mmrl train examples/video_grounding/grpo.yaml learn.learning_rat=1\n",
            "did you mean 'learning_rate'",
        ),
        ("sh", "mmrl train methods/grpo/grpo.yaml policy=vision.recorded_answers\n", "required key"),
        ("sh", "mmrl list surogate\n", "there is no kind 'surogate'"),
        ("sh", "make everything\n", "not 'everything'"),
        ("sh", "make demo ARGS='--sed 1'\n", "takes no --sed"),
        ("sh", "make demo FLAGS='--seed 1'\n", "does not read FLAGS"),
        ("sh", "pip install -e '.[clap]'\n", "there is no extra ['clap']"),
        ("sh", "pip install flash-attn\n", "is not this package"),
        ("sh", "python -m benchmarks.no_such\n", "there is no module"),
        (
            "sh",
            "accelerate launch --config_file configs/accelerate/no.yaml -m mmrl train train/image_awm.yaml\n",
            "no file",
        ),
        (
            "sh",
            "accelerate launch --nmu_processes 8 -m mmrl train examples/video_grounding/grpo.yaml\n",
            "SystemExit",
        ),
        (
            "sh",
            "accelerate launch -m mmrl train examples/video_grounding/grpo.yaml polcy.model=x\n",
            "did you mean 'policy'",
        ),
        ("sh", "rm -rf runs\n", "nobody knows how to check `rm -rf runs`"),
    ],
)
def test_a_block_that_is_wrong_is_found(kind, text, message, reader):
    block = Block("page.md", 1, kind, text)
    with folder_of([block], reader), pytest.raises(Untrue, match=re.escape(message)):
        run(block, reader)


def test_blocks_are_cut_out_with_their_place():
    text = "words\n\n```sh\nmake test\n```\n\n1. list\n\n   ```yaml\n   a: 1\n   ```\n"
    assert blocks_of(text, "p") == [Block("p", 3, "sh", "make test\n"), Block("p", 9, "yaml", "a: 1\n")]
    with pytest.raises(Untrue, match="never closed"):
        blocks_of("```sh\nmake test\n", "p")


@pytest.mark.parametrize("page", TEXTS)
def test_commands_in_sentences_exist(page):
    for code in inline_commands(TEXTS[page]):
        check_inline(code)


@pytest.mark.parametrize("code", ["mmrl trian CONFIG", "make everything", "pip install 'mmrl[clap]'"])
def test_a_command_in_a_sentence_that_does_not_exist_is_found(code):
    assert list(inline_commands(f"Say `{code}` to it.")) == [code]
    with pytest.raises(Untrue):
        check_inline(code)


def test_every_command_of_the_makefile_is_told():
    told = {words for words in re.findall(r"^make ([\w-]+)", README, re.MULTILINE)}
    assert told == make_targets() - {"plain"}  # a part of `make test-all`


# ---- what the examples do


def example(page: str, file: str) -> Block:
    return next(block for block in BLOCKS[page] if block.file == file)


@pytest.fixture
def module(reader):
    """Import a file of a page."""
    entered = []

    def enter(page: str, file: str):
        context = folder_of(BLOCKS[page], reader)
        context.__enter__()
        entered.append(context)
        run(example(page, file), reader)
        return sys.modules[Path(file).stem if "/" not in file else f"mmrl.{file[:-3].replace('/', '.')}"]

    yield enter
    for context in entered:
        context.__exit__(None, None, None)


def prompt_of(uid="p", target=None, **columns) -> Prompt:
    return Prompt(uid, (Message("user", (Part("When?"),)),), target, columns=columns)


def test_the_reward_example_counts_characters(module):
    short_answer = module("docs/howto/reward.md", "my_rewards.py").short_answer
    asked = [prompt_of(format="answer"), prompt_of(format="answer"), prompt_of()]
    given = [Outcome(text="x" * 40), Outcome(text="x" * 41), Outcome(text="x")]
    assert short_answer(asked, given) == [1.0, 0.0, None]


def test_the_group_reward_example_counts_votes(module):
    agrees = module("docs/howto/reward.md", "my_group_rewards.py").agrees
    asked = [prompt_of("a")] * 4 + [prompt_of("b")]
    said = [Outcome(text=text) for text in ("Yes", "yes ", "no", "yes", "yes")]
    assert agrees(asked, said) == [0.75, 0.75, 0.25, 0.75, 1.0]


def test_the_example_for_trl_is_called_as_trl_calls_it(module):
    import asyncio

    module("docs/howto/reward.md", "trl_rewards.py")
    reward = find("reward", "trl_rewards:mentions_target").target
    given = reward([prompt_of(target=12), prompt_of(target=7)], [Outcome(text="at 12 s")] * 2)
    assert asyncio.run(given) == [1.0, 0.0]


def test_the_advantage_example_subtracts_the_median(module):
    group_median = module("docs/howto/advantage.md", "my_advantages.py").group_median
    # Two groups: the median of 1, 0, 4 is 1, that of 2, 6, 3 is 3.
    table = group_median(reward_table([1.0, 0.0, 4.0, 2.0, 6.0, 3.0], group="aaabbb"))
    assert table.values.flatten().tolist() == [0.0, -1.0, 3.0, -1.0, 3.0, 0.0]


def test_the_surrogate_example_trains(module, reader):
    module("docs/howto/advantage.md", "my_surrogates.py")
    surrogate = {"name": "my_surrogates:squared", "strength": 1.0}
    toy = build(parse(plan(reader / "run", objective={"surrogate": surrogate}), Config), quiet=True)
    before = toy.policy.table.detach().clone()
    train(toy)
    assert not torch.equal(before, toy.policy.table)


ADVANTAGE = "docs/howto/advantage.md"


def rules_of_a_piece(entry) -> None:
    """Apply what the tests of every piece of the library ask for."""
    rules = (
        registry.test_a_piece_has_a_docstring_of_whole_sentences,
        registry.test_options_are_keyword_only_and_typed,
        registry.test_a_piece_stands_in_the_home_of_its_kind,
        registry.test_a_piece_is_tested_by_its_own_name,
        documented.test_the_first_line_of_a_piece_is_short,
        documented.test_every_option_of_a_piece_is_documented,
    )
    found = [what for one in rules for what in violations(one.check, entry)]
    found += [what for name in entry.options for what in ranges.problems_of(entry, name, set())]
    assert not found, f"{piece_name(entry)}: {found}"
    case = contracts.Case(entry)
    contracts.test_objectives_and_their_parts_change_nothing_and_draw_nothing(case)
    contracts.test_two_processes_give_the_gradients_of_one(case)
    for extreme in ("far", "very far", "equal", "alone", "empty row", "blank"):
        contracts.test_objectives_stay_finite(case, extreme)


def test_the_surrogate_of_the_page_keeps_the_rules_of_the_repository(module, reader):
    module(ADVANTAGE, "objectives/squared.py")
    entry = find("surrogate", "squared")
    rules_of_a_piece(entry)
    importlib.import_module("test_squared").test_squared()
    path = reader / "methods" / "squared.yaml"
    assert [*violations(configs.test_a_variant_is_short_and_names_its_source.check, path)] == []
    method = Method(path, comment_of(path.read_text()), as_plain(read(path)))
    assert method.differs == "squared log-ratio in place of the clip; no KL." and method.pieces()


@pytest.mark.parametrize(
    ("text", "wrong", "told"),
    [
        ("strength: NonNegativeFloat = 0.5", "strength: int = 1", "annotate a type of mmrl/config/ranges.py"),
        ("batch: Batch, *, ", "batch: Batch, ", "put `*` before the options"),
        ("log_ratio: Tensor", "log_ratio", "annotate it, as `log_ratio: Tensor`"),
        (".clamp(-20.0, 20.0)", "", "limit log-ratios before `exp`"),
        ("    return -", "    batch.advantage.mul_(2)\n    return -", "changes what it is given"),
        ("    return -", "    torch.rand(1)\n    return -", "an option named `generator`"),
        ("+ strength * held.square()", "* torch.ones(1, 1, 1)", "returns the shape"),
        ('"""Follow', '"""follow', "begin the docstring with a capital"),
    ],
)
def test_rules_that_a_new_piece_breaks_say_what_to_write(text, wrong, told, module, monkeypatch):
    block = example(ADVANTAGE, "objectives/squared.py")
    broken = block.text.replace(text, wrong).replace("from torch", "import torch\nfrom torch")
    assert broken.count(wrong)
    rest = [one for one in BLOCKS[ADVANTAGE] if one is not block]
    monkeypatch.setitem(BLOCKS, ADVANTAGE, [replace(block, text=broken), *rest])
    module(ADVANTAGE, "objectives/squared.py")
    with pytest.raises(AssertionError, match=re.escape(told)) as error:
        rules_of_a_piece(find("surrogate", "squared"))
    assert "mmrl.objectives.squared" in str(error.value)


def test_the_engine_example_asks_with_its_hint_and_keeps_groups(module):
    hinting = module("docs/howto/engine.md", "my_engines.py").WithHint
    asked = []
    inner = SimpleNamespace(policy=None, rollout=lambda prompts: asked.extend(prompts) or ())
    hinting(inner, hint="Be brief.").rollout([prompt_of("a"), prompt_of("a")])
    assert [(one.uid, one.text) for one in asked] == [("a", "When?\nBe brief.")] * 2


def test_the_layout_example_counts_features(module):
    module("docs/howto/model.md", "my_layout.py")
    from mmrl.vision.models.model_families import family_of

    core = SimpleNamespace(config=SimpleNamespace(image_token_id=5, image_seq_length=16))
    family = family_of(SimpleNamespace(model_type="my_vlm"))
    inputs = {"input_ids": torch.zeros(1, 3), "pixel_values": torch.zeros(2, 3, 8, 8)}
    assert family.features(core, inputs) == {5: 32} and family.positions(core, inputs).tolist() == [[0, 1, 2]]


def test_the_family_example_is_a_family_and_no_other_piece_is_in_its_way(module):
    from mmrl.diffusion.model_family import PipelineFamily, family_of

    own = module("docs/howto/model.md", "my_model.py").MyModel
    assert type(family_of("MyPipeline")) is own
    public = {name: value for name, value in vars(PipelineFamily).items() if not name.startswith("_")}
    methods = {name for name, value in public.items() if callable(value)}
    assert methods | set(PipelineFamily.__annotations__) <= set(dir(own))


@pytest.mark.slow
def test_the_family_example_reads_the_network_as_sd3_does(module, tmp_path):
    from mmrl.diffusion.model_family import Request, family_of
    from tests.diffusion.tiny import load, tiny_sd3

    tiny_sd3(tmp_path / "sd3")
    pipe = load(tmp_path / "sd3")
    theirs = family_of("StableDiffusion3Pipeline")
    ours = module("docs/howto/model.md", "my_model.py").MyModel()
    shape = theirs.latent_shape(pipe, 32, 48, 1)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    given = (pipe.transformer, latents, torch.tensor([0.7]))
    with torch.no_grad():
        said = [
            family.velocity(*given, family.stack(family.encode(pipe, [Request("a cat")], 16)), torch.ones(1))
            for family in (ours, theirs)
        ]
    assert ours.latent_shape(pipe, 32, 48, 1) == shape
    assert torch.equal(*said)


# ---- tables of the pages


def test_every_method_says_what_differs(hooks):
    from site_files import METHODS, methods_table

    table = methods_table()
    for path in METHODS:
        row = next(line for line in table.splitlines() if line.startswith(f"| [{path.stem}]("))
        assert len(row.split("|")[3].strip()) > 5, f"{path.name} needs a comment 'Differs from GRPO: ...'"


def test_the_readme_is_short():
    assert len(README.encode()) <= 8192


def test_the_tree_names_folders_that_are_there():
    for name in re.findall(r"`([\w/.]+)`", TEXTS["docs/where.md"]):
        if "/" in name and not name.startswith("mmrl."):
            assert (ROOT / name).exists(), name


def test_the_example_of_the_recipes_is_the_file():
    text = (ROOT / "configs" / "train" / "charades_sta_tempsamp.yaml").read_text().strip()
    assert text in TEXTS["docs/howto/recipes.md"]


def test_getting_started_takes_six_commands_at_most():
    page = "docs/index.md"
    section = TEXTS[page].partition("## From a checkout")[2].partition("**5. Look.**")[0]
    commands = [
        line for block in blocks_of(section, page) if block.kind == "sh" for line in block.text.splitlines()
    ]
    assert commands[0].startswith("pip install") and commands[-1] == "mmrl train my_run.yaml"
    assert len(commands) <= 6 and "report.html" in TEXTS[page]


def test_every_linked_file_is_there():
    for name in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", README):
        assert (ROOT / name).exists(), name


def test_the_page_of_the_doctor_quotes_what_the_doctor_says():
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \| `([^|]+)` \|$", TEXTS["docs/howto/doctor.md"], re.MULTILINE)
    assert len(rows) >= 8
    for name, checkup, said in rows:
        _, found_by, message = MISTAKES[name]
        assert checkup == found_by and said in message, name


@cache
def glossary() -> dict[str, str]:
    """Read metrics and the trainers of TRL that have them."""
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \|([^|]*)\|$", TEXTS["docs/metrics.md"], re.MULTILINE)
    return {name: trainers.strip() for name, trainers in rows}


def explains(name: str) -> set[str]:
    """Find the entries of the glossary that a metric goes by."""
    found = set()
    for entry in glossary():
        pattern = re.sub(r"\\\{metric\\\}", ".+", re.escape(entry))  # its name may have parts of its own
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", pattern)
        if re.fullmatch(pattern, name):
            found.add(entry)
    return found


# What toys do not write, and which file does: a step not taken, a GPU's memory, a model with two engines.
RARE = {
    **{f"hints/{name}": "mmrl/samplers/hints.py" for name in ("prompts", "solved")},
    "hints/share": "mmrl/papers/adhint.py",
    "majority/share": "mmrl/rewards/votes.py",
    "judge/unread": "mmrl/rewards/asking.py",
    "judge/mass": "mmrl/rewards/judge.py",
    **{f"pairwise_judge/{name}": "mmrl/rewards/pairwise_judge.py" for name in ("consistency", "first")},
    **{f"tools/{name}": "vision/engines/with_tools.py" for name in ("turns", "calls", "errors")},
    **{f"game/{name}": "mmrl/engines/play.py" for name in ("turns", "unfinished")},
    "game/share_of_turns/{role}": "mmrl/engines/play.py",
    "workers/restarts": "mmrl/engines/ray_workers.py",
    **{f"workers/{what}_seconds": "mmrl/engines/ray_workers.py" for what in ("busy", "idle")},
    **{
        f"vllm/{name}": "vision/serving/servers.py"
        for name in (
            "servers",
            "asked_again",
            "publish_seconds",
            "publish_bytes",
            "request_bytes",
            "busy_seconds",
            "idle_seconds",
        )
    },
    "vllm/pruning_gap": "vision/engines/vllm.py",
    "skipped_updates": "mmrl/training/trainer.py",
    **{f"energy/{kind}_joules": "mmrl/runtime/machine.py" for kind in ("cpu", "gpu")},
    "eval_peak_memory_bytes": "mmrl/training/evaluate.py",
    **{
        f"rollout/{name}": "compression/engines.py"
        for name in ("seconds", "exact_seconds", "speedup", "agreement")
    },
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> set[str]:
    """Train a text, an image and two pair runs for two steps, and list what their journals hold."""
    folder = tmp_path_factory.mktemp("runs")
    measured = {"data": "tests.support.toys:prompts", "metrics": ["mean"]}
    falling = {"name": "k3", "coef": {"name": "linear", "start": 0.001, "end": 0.0}}
    text = plan(
        folder / "text",
        references={"ref": "frozen", "ema": {"name": "ema", "decay": 0.9}},
        objective={"penalty": [falling, {"name": "k3", "against": "ema"}]},
        group_filter="varied",
        sampler=["vade", "allocate"],
        rewards=[
            "tests.support.toys:share_right",
            {"name": f"{__name__}:undefined_once", "on_error": "skip"},
        ],
        evaluation=measured,
        eval_steps=1,
        learn={"num_iterations": 2},
        rollout={"num_prompts": 8},
    )
    pairs = {
        "data": {"name": "tests.support.toys:prompts", "answers": 2},
        "rollout": {"engine": ["offline"], "num_generations": 2},
        "advantage": ["total", "best_vs_worst"],
        "objective": {"name": "comparison", "implicit_reward": "log_ratio", "compare": ["sigmoid"]},
        "references": {"ref": "frozen"},
        "sampler": {"name": "pools", "by": "wanted", "pools": ["low", "high"], "edges": [3]},
    }
    pair = {**plan(folder / "pair"), **pairs}
    rows = {"engine": ["offline", "with_mismatched"], "num_generations": 3}
    chain = ["total", "best_vs_worst", "kto_kl_rows"]
    single = {**pair, "rollout": rows, "advantage": chain, "output_dir": str(folder / "single")}
    single["objective"] = {**pairs["objective"], "compare": ["kto"]}
    scorer = {**pair, "policy": {"name": "tests.support.toys:ToyScores", "labels": ["brevity"]}}
    scorer |= {"advantage": ["total", "pairs_with_ties"], "objective": "bradley_terry", "references": {}}
    scorer["output_dir"] = str(folder / "scorer")
    image = flow_plan(
        folder / "image",
        advantage=["total", "group_normalize"],
        objective={
            "name": "policy_gradient",
            "surrogate": "clip",
            "aggregation": "step_mean",
            "penalty": ["gaussian_kl"],
        },
        references={"ref": "frozen"},
    )
    critic = {
        "name": "second_model",
        "policy": "tests.support.toys:ToyCritic",
        "advantage": ["total", "lambda_returns"],
        "objective": "value_regression",
    }
    chance = {
        "name": "second_model",
        "policy": {"name": "tests.support.toys:ToyCritic", "probability": True},
        "advantage": [{"name": "pick", "of": "share_right"}, "value_targets"],
        "objective": "value_cross_entropy",
    }
    learning = {"critic": critic, "chance": chance}
    second = plan(folder / "second", advantage=["total", "gae"], references=learning)
    names: set[str] = set()
    for raw in (text, image, pair, scorer, single, second):
        toy = build(parse({**raw, "max_steps": 2, "report": {"trackers": []}}, Config), quiet=True)
        train(toy)
        names |= {name for record in toy.journal.read() for name in record}
    return names


def undefined_once(prompts, outcomes):
    return [math.nan if prompt.uid == "p0" else 0.0 for prompt in prompts]


def test_every_metric_of_a_journal_is_in_the_glossary(written):
    assert {name for name in written if not explains(name)} == set()


def test_no_entry_of_the_glossary_is_stale(written):
    seen = {entry for name in written for entry in explains(name)}
    papers = "".join(path.read_text() for path in (ROOT / "mmrl" / "papers").glob("*.py"))
    unseen = set(glossary()) - seen - set(RARE)
    assert {name for name in unseen if f'"{name}"' not in papers} == set()
    for name, file in RARE.items():
        assert f'"{name.removeprefix("eval_")}"' in (ROOT / file).read_text(), name


def test_the_names_of_trl_are_those_of_trl():
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "trainer"
    for name, trainer in glossary().items():
        if trainer in ("GRPO", "DPO"):
            source = (folder / f"{trainer.lower()}_trainer.py").read_text() + (
                folder / "base_trainer.py"
            ).read_text()
            assert re.search(re.sub(r"\\\{\w+\\\}", r"\\{[^}]*\\}", re.escape(name)), source), name


def test_the_drawings_are_what_their_code_draws(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import drawings

    for name in ("idea", "steps"):
        assert (ROOT / "docs" / f"{name}.svg").read_text() == getattr(drawings, name)(), (
            "python docs/drawings.py"
        )


# ---- the site


@pytest.fixture
def hooks(monkeypatch):
    """Import what mkdocs calls."""
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import hooks

    return SimpleNamespace(relink=hooks.relink, generated=lambda: made_by(hooks.generated))


@cache
def made_by(generate):
    return generate()


def test_every_piece_has_a_place_on_the_site_by_its_kind_alone(hooks):
    from site_pieces import page_of

    made = hooks.generated()
    library = [entry for kind in HOMES for entry in library_pieces(kind)]
    for entry in library:
        page, _, place = page_of(entry).partition("#")
        assert f"### `{entry.full_name}` {{#{place}}}" in made[page], entry.full_name


def test_a_page_of_pieces_says_options_needs_variants_and_papers(hooks):
    text = hooks.generated()["pieces/surrogate.md"]
    clip = text[text.index("{#surrogate-clip}") :].partition("### ")[0]
    assert "| `epsilon` | `float (at least 0)` | `0.2` |" in clip and "[grpo](../variants.md#grpo)" in clip
    penalty = hooks.generated()["pieces/penalty.md"]
    assert "Reads: of the policy `dt`, `mean`, `std`; of the policy named by `against` `mean`." in penalty
    assert "(https://arxiv.org/abs/2512.02556)" in penalty


def test_the_page_of_keys_has_words_for_every_key(hooks):
    rows = [line.split(" | ") for line in hooks.generated()["keys.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    for name, _, words, kind in rows:
        assert len(words) > 3, f"{name}: write a comment behind the field in mmrl/config/schema.py"
        assert not re.search(r"`|[A-Z]|tuple", kind), (name, kind)


def test_the_index_of_papers_holds_every_paper_of_the_variants(hooks):
    made = hooks.generated()
    for path in (ROOT / "configs" / "variants").glob("*.yaml"):
        for paper in re.findall(r"arXiv (\d{4}\.\d{5})", path.read_text()):
            (row,) = [line for line in made["papers.md"].splitlines() if f"abs/{paper})" in line]
            assert f"(variants.md#{path.stem})" in row


def test_links_to_configurations_lead_to_their_page(hooks):
    pages = "[a](../configs/methods/preference/dpo.yaml) [b](../configs/train/image_awm.yaml)"
    text = f"{pages} [c](../mmrl/cli/__init__.py)"
    assert hooks.relink(text, "../") == "[a](../variants.md#dpo) [b](../runs.md#image_awm) c"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for path in pages:
        page = path.read_text()
        assert (
            re.findall(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?https?://[^"'>]*""", page) == []
        )
        for name in re.findall(r"""<img[^>]+src="([^"]+)\"""", page):
            assert (path.parent / name).is_file(), name


BROKEN = """
import sys
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
site, config, *folders = sys.argv[1:]
for docs in folders:
    given = {"docs_dir": docs, "site_dir": site, "strict": True}
    try:
        build(load_config(config, nav=["index.md"], hooks=[], plugins=[], **given))
        print("built")
    except Abort:
        print("stopped")
"""


@pytest.mark.slow
def test_a_broken_link_stops_the_build(tmp_path):
    # In a process of its own: mkdocs counts warnings by logging, which other packages switch off.
    pytest.importorskip("mkdocs")
    folders = []
    for words in ("[gone](gone.md)", "gone", "[gone](index.md#gone)", "![gone](gone.svg)"):
        folders.append(tmp_path / str(len(folders)))
        folders[-1].mkdir()
        (folders[-1] / "index.md").write_text(f"# Here\n\n{words}\n")
    given = [str(path) for path in (tmp_path / "site", ROOT / "mkdocs.yml", *folders)]
    built = subprocess.run(
        [sys.executable, "-c", BROKEN, *given], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert built.stdout.split() == ["stopped", "built", "stopped", "stopped"], built.stderr
