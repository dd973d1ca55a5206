"""Names to pieces, and what every registered piece must have."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from mmrl.config import registry
from mmrl.config.binding import Bound, Pieces
from mmrl.config.registry import HOMES, PIECES, SCOPES, WINGS, Needs, find, pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Unit
from tests.support.configs import library_pieces
from tests.support.rules import piece_name, rule

HERE = Path(__file__).parents[1]
EVERY = [entry for kind in HOMES for entry in library_pieces(kind)]
NAMED = rule(EVERY, piece_name)
TESTS = [path for path in HERE.rglob("test_*.py") if path != Path(__file__)]
WORDS = {word for path in TESTS for word in re.findall(r"\w+", path.read_text())}


# ---- every piece


@NAMED
def test_a_piece_has_a_docstring_of_whole_sentences(entry):
    summary = entry.summary
    if not (summary[:1].isupper() and summary.rstrip(")").endswith((".", ":"))):
        yield f"begin the docstring with a capital and end a sentence with a full stop, not {summary!r}"


@NAMED
def test_options_are_keyword_only_and_typed(entry):
    kinds = inspect.Parameter
    for name, parameter in inspect.signature(entry.target).parameters.items():
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            yield f"'{name}' passes anything through; list the options"
        elif parameter.default is not kinds.empty and parameter.kind is not kinds.KEYWORD_ONLY:
            yield f"the option '{name}' is not keyword-only; put `*` before the options"
        if parameter.annotation is kinds.empty:
            yield f"'{name}' has no type; annotate it, as `{name}: Tensor`"


@NAMED
def test_a_piece_stands_in_the_home_of_its_kind(entry):
    if entry.target.__module__.startswith("mmrl.papers."):
        return  # the pieces of a paper stand together, of whatever kind
    packages = [SCOPES[entry.scope]] if entry.scope else WINGS
    homes = tuple(f"{package}.{HOMES[entry.kind]}." for package in packages)
    if not f"{entry.target.__module__}.".startswith(homes):
        yield f"move it into {' or '.join(homes)}"
    if entry.name != entry.name.lower():
        yield "write its name in small letters"


@NAMED
def test_a_piece_is_tested_by_its_own_name(entry):
    own = {entry.name, inspect.unwrap(entry.target).__name__}
    if not own & WORDS:
        yield f"no test says {' or '.join(sorted(own))}; write one"


def test_the_base_pieces_are_there():
    wanted = {
        "advantage": {
            "total",
            "group_normalize",
            "batch_normalize",
            "per_step",
            "high_entropy",
            "tempsamp_anchor",
        },
        "surrogate": {"clip", "unclipped", "log_likelihood", "cispo", "sapo"},
        "aggregation": {"sequence_mean", "step_mean", "fixed_length", "length_weighted"},
        "penalty": {"k1", "k2", "k3", "entropy_bonus"},
        "objective": {"policy_gradient"},
        "engine": {"offline", "with_demos", "vision.generate"},
        "reference": {"frozen", "ema"},
    }
    for kind, names in wanted.items():
        assert names <= {entry.full_name for entry in pieces(kind)}


# ---- kinds


def test_a_piece_of_a_kind_with_stages_declares_when_it_runs():
    with pytest.raises(ValueError, match="a check declares `on`, one of data, start, training, not ''"):
        registry.check(lambda records: [])
    with pytest.raises(ValueError, match="a metric declares `on`, one of none, not 'start'"):
        registry.metric(on="start")
    assert {entry.on for entry in pieces("check")} == {"data", "start", "training"}
    assert all(entry.on == "data" for entry in pieces("check", on="data"))


# ---- looking up


def test_a_piece_is_found_by_its_name_and_by_the_name_of_its_function():
    entry = find("surrogate", "clip")
    assert (entry.kind, entry.name, entry.scope, entry.full_name) == ("surrogate", "clip", "", "clip")
    assert find("surrogate", "mmrl.objectives.surrogates:clip") is entry


def test_a_class_is_named_in_snake_case_and_a_scope_stands_before_the_name():
    assert find("engine", "with_demos").target.__name__ == "WithDemos"
    assert find("engine", "vision.generate").full_name == "vision.generate"


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (
            "advantage",
            "group_normalise",
            "no advantage is called 'group_normalise'; did you mean 'group_normalize'?",
        ),
        ("engine", "generate", "did you mean 'vision.generate'?"),
        (
            "objective",
            "zzz",
            "no objective is called 'zzz'; there are bidirectional, bradley_terry, comparison",
        ),
        ("advantage", "clip", "no advantage is called 'clip'"),
    ],
)
def test_an_unknown_name_suggests_the_nearest_or_lists_all(kind, name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        find(kind, name)


def check(kind: str, name: str, **options) -> None:
    Pieces(Stream()).check(kind, Piece(name, options))


def test_a_wrong_option_lists_the_right_ones():
    message = "surrogate 'clip' has no option 'epsilon_hgh'; it takes epsilon, epsilon_high, delta, dual"
    with pytest.raises(ValueError, match=re.escape(message)):
        check("surrogate", "clip", epsilon=0.1, epsilon_hgh=0.3)
    with pytest.raises(ValueError, match="surrogate 'unclipped' has no option 'epsilon'; it takes none"):
        check("surrogate", "unclipped", epsilon=0.1)


def test_required_options_that_are_missing_are_named():
    with pytest.raises(ValueError, match="needs the options max_completion_length, soft_punish_cache"):
        check("reward", "overlong")
    check("sampler", "uniform")  # the run fills its stream


def test_needs_join_to_the_coarsest_unit_and_all_names():
    one = Needs(Unit.ROW, frozenset({"mean"}), {"ref": frozenset({"mean"})}, frozenset({"logp"}))
    two = Needs(Unit.STEP, frozenset({"std"}), {"ref": frozenset({"std"}), "ema": frozenset()})
    both = one | two
    assert (both.unit, both.outputs, both.notes) == (Unit.ROW, {"mean", "std"}, {"logp"})
    assert dict(both.others) == {"ref": {"mean", "std"}, "ema": frozenset()}
    assert Needs() | one == one


def test_of_others_is_asked_of_the_policy_that_against_names(file):
    module = file("kept_apart", "from mmrl.config.registry import penalty\n\n\n" + PENALTY)
    entry = PIECES["penalty", "kept_apart"]
    assert entry.target is module.kept_apart
    for against in ("ref", "ema"):
        options = {} if against == "ref" else {"against": against}
        assert Bound(entry, entry.target, options, Stream()).needs.others == {against: {"mean"}}


PENALTY = '''@penalty(extra={"mean"}, of_others={"mean"})
def kept_apart(new, batch, *, coef: float = 1.0, against: str = "ref"):
    """Keep means apart."""
'''


# ---- two pieces of one name


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Run text as a module of the objectives or rewards, and forget what it registered."""
    monkeypatch.setattr(registry, "PIECES", PIECES)
    before = dict(PIECES)

    def run(name: str, text: str, home: str = "objectives"):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"mmrl.{home}.{name}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    yield run
    PIECES.clear()
    PIECES.update(before)


SURROGATE = '''from mmrl.config.registry import surrogate


@surrogate
def twice(log_ratio, new, batch):
    """Do something."""
'''
REWARD = '''from mmrl.config.registry import reward
from mmrl.rewards.adapters import per_outcome


@reward
@per_outcome
def twice(prompt, outcome):
    """Measure something."""
'''


@pytest.mark.parametrize(
    ("kind", "home", "text"), [("surrogate", "objectives", SURROGATE), ("reward", "rewards", REWARD)]
)
def test_two_pieces_of_one_name_are_an_error_that_names_both_files(file, kind, home, text):
    file("one", text, home)
    with pytest.raises(
        ValueError, match=rf"two pieces of kind '{kind}' are called 'twice': .*one\.py and .*two\.py"
    ):
        file("two", text, home)


def test_one_name_may_stand_for_pieces_of_two_kinds(file):
    file("one", SURROGATE)
    file("two", REWARD, "rewards")
    assert {kind for kind, name in PIECES if name == "twice"} == {"surrogate", "reward"}


def test_running_a_file_again_replaces_its_pieces(file):
    file("one", SURROGATE)
    module = file("one", SURROGATE)
    assert PIECES["surrogate", "twice"].target is module.twice


# ---- pieces of others


@pytest.mark.parametrize(
    "name", ["tests.no_such_module:f", "tests.support.toys:no_such_function", "builtins:dict"]
)
def test_somebody_elses_piece_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match=f"cannot import the engine '{name}'"):
        find("engine", name)


def test_somebody_elses_piece_takes_its_keyword_only_parameters():
    entry = find("policy", "tests.support.toys:ToyText")
    assert {"num", "length", "vocab"} <= set(entry.options)
    with pytest.raises(ValueError, match="no option 'lenght'; it takes num, .*did you mean 'length'"):
        check("policy", "tests.support.toys:ToyText", lenght=3)


def test_needs_name_other_policies_in_one_order_on_every_process():
    # Sets of strings have another order in every process; sharded weights have to be asked for in the same.
    names = [f"other{i}" for i in range(20)]
    joined = Needs()
    for name in reversed(names):
        joined |= Needs(others={name: frozenset()})
    assert list(joined.others) == sorted(names)
