"""Dashboards: what each is told, that a run goes on where it stood, and what happens where one is missing."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest

from mmrl.build import build
from mmrl.config.registry import find
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.reporting.trackers import Tensorboard, Trackio, Wandb, run_id
from mmrl.training.loop import train
from tests.support.toys import plan, toy_run

NAMES = ("tensorboard", "wandb", "trackio")


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr("mmrl.reporting.trackers.find_spec", lambda name: None)


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_asked_for_must_be_installed(name, nothing_installed):
    make = find("tracker", name).target
    with pytest.raises(ConfigError, match=rf"asks for {name}, .*pip install 'mmrl\[{name}\]'"):
        make()


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_not_required_only_says_so(name, nothing_installed, tmp_path):
    tracker = find("tracker", name).target(required=False)
    assert f"install mmrl[{name}]" in tracker.open(tmp_path, {}, 0)
    tracker.write({"reward": 1.0}, 0)
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_one_is_noticed_before_anything_is_loaded(tmp_path, monkeypatch):
    raw = plan(tmp_path, report={"trackers": ["wandb"]}, policy=f"{__name__}:unreachable")
    monkeypatch.setattr("mmrl.reporting.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="report.trackers asks for wandb"):
        build(parse(raw, Config), quiet=True)


class unreachable:
    """A policy that must not be made."""

    outputs = frozenset({"entropy"})

    def __init__(self) -> None:
        raise AssertionError("loaded")


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ConfigError, match="asks for trackio"):
        Trackio()


def test_default_runs_ask_for_nothing_that_is_not_installed(nothing_installed):
    (piece,) = Config.report.trackers
    assert find("tracker", piece.name).target(**piece.options).installed is False


def test_a_run_is_known_by_what_lies_in_its_folder(tmp_path):
    first = run_id(tmp_path)
    assert run_id(tmp_path) == first and len(first) == 8
    (tmp_path / "other").mkdir()
    assert run_id(tmp_path / "other") != first


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ({"name": "wandb", "mode": "offlin"}, "'report.trackers\\[0\\].mode' must be one of 'online'"),
        ({"name": "wandb", "projekt": "x"}, "has no option 'projekt'; it takes project, run_name, mode"),
        ("comet", "no tracker is called 'comet'; there are tensorboard, trackio, wandb"),
    ],
)
def test_options_are_checked(piece, message, tmp_path):
    from mmrl.build import check

    with pytest.raises(ConfigError, match=message):
        check(parse(plan(tmp_path, report={"trackers": [piece]}), Config))


# ---- tensorboard


def points(folder, name):
    """Read (step, value) of a curve as tensorboard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(event.step, round(event.value, 6)) for event in found.Scalars(name)]


@pytest.mark.slow
def test_tensorboard_hides_what_came_after_the_checkpoint(tmp_path):
    pytest.importorskip("tensorboard")
    first = Tensorboard()
    assert first.open(tmp_path, {}, 0) == ""
    for step in range(4):
        first.write({"reward": float(step)}, step)
    first.close()
    again = Tensorboard()
    again.open(tmp_path, {}, 2)
    for step in (2, 3, 4):
        again.write({"reward": 10.0 + step}, step)
    again.close()
    assert points(tmp_path, "reward") == [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]


# ---- trackio, as far as it is used: a module of the same signatures that writes JSON

STAND_IN = """
import json, os

class Run:
    def __init__(self, name):
        self.name = name

    def log(self, metrics: dict, step: int | None = None):
        _note({"log": metrics, "step": step, "run": self.name})

    def finish(self):
        _note({"finish": self.name})


def _note(what):
    with open(os.environ["TRACKIO_NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")


def init(project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None,
         config=None, resume="never", settings=None, private=None, embed=True, auto_log_gpu=None,
         gpu_log_interval=10.0, auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None,
         webhook_min_level=None):
    _note({"init": project, "name": name, "space_id": space_id, "resume": resume, "embed": embed,
           "config": config})
    return Run(name)
"""


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    """Put the module in the way, and read what it was told."""
    home = tmp_path / "modules"
    home.mkdir()
    (home / "trackio.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setenv("TRACKIO_NOTES", str(tmp_path / "notes"))
    yield lambda: [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    sys.modules.pop("trackio", None)


def test_trackio_is_told_every_step_under_a_name_of_its_own(trackio, tmp_path):
    folder = tmp_path / "grounding"
    folder.mkdir()
    tracker = Trackio(space_id="somebody/space")
    name = f"grounding-{run_id(folder)}"
    assert tracker.open(folder, {"seed": 3}, 0) == f"trackio: project mmrl, run {name}"
    tracker.write({"reward": 0.5}, 7)
    tracker.close()
    told = {"name": name, "space_id": "somebody/space", "resume": "allow", "embed": False}
    assert trackio() == [
        {"init": "mmrl", **told, "config": {"seed": 3}},
        {"log": {"reward": 0.5}, "step": 7, "run": name},
        {"finish": name},
    ]


def test_a_run_that_goes_on_is_the_same_run_in_trackio(trackio, tmp_path):
    changes = {"report": {"trackers": [{"name": "trackio", "project": "toys"}]}, "save_steps": 1}
    train(toy_run(tmp_path / "run", max_steps=2, **changes))
    train(toy_run(tmp_path / "run", max_steps=3, **changes))
    told = trackio()
    begun = [one for one in told if "init" in one]
    assert len(begun) == 2 and begun[0]["name"] == begun[1]["name"]
    assert {one["init"] for one in begun} == {"toys"} and begun[0]["config"]["max_steps"] == 2
    assert [one["step"] for one in told if "log" in one] == [0, 1, 2]
    assert "rewards/share_right/advantage_share" in told[1]["log"]


# ---- wandb


@pytest.mark.slow
def test_wandb_keeps_a_run_on_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    changes = {"report": {"trackers": [{"name": "wandb", "mode": "offline"}]}, "save_steps": 1}
    for steps in (1, 2):
        train(toy_run(tmp_path / "run", max_steps=steps, **changes))
    kept = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    own = run_id(tmp_path / "run")
    assert [path.name for path in kept] == [f"run-{own}.wandb"] * 2
    deadline = time.monotonic() + 600  # the process of wandb that writes them ends after the run
    while not all(map(stepped, kept)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [stepped(path) for path in kept] == [{0}, {1}]


def stepped(path):
    """Read the steps that wandb wrote down: the key `_step`, and behind two bytes the length and the JSON of
    its value."""
    return {int(digit) for digit in re.findall(rb"\x05_step\x82\x01\x01(\d)", path.read_bytes())}


def test_wandb_without_an_account_says_what_to_do(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**options):
        raise wandb.errors.UsageError("no API key configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(
        RuntimeError, match="no API key configured. Run `wandb login` once, or set `mode: off"
    ):
        Wandb().open(tmp_path, {}, 0)
