"""The README is true: its files are the files, its examples run, and its table is whole."""

import re
import sys
from pathlib import Path

import pytest

from mmrl.build import check
from mmrl.config import Config, load
from tests.tables import reward_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def code_of(first_line: str) -> str:
    """Cut out the Python block that begins with a line."""
    return next(
        block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if first_line in block
    )


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Put the two example modules where Python finds them."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("my_rewards", "my_advantages"):
        (folder / f"{name}.py").write_text(code_of(f"# {name}.py"))
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def test_the_charades_example_is_the_file():
    assert (ROOT / "configs" / "charades_sta_tempsamp.yaml").read_text().strip() in README


def test_every_variant_is_in_the_table():
    named = set(re.findall(r"\(configs/(variants/\w+\.yaml)\)", README))
    assert named == {f"variants/{path.name}" for path in (ROOT / "configs" / "variants").glob("*.yaml")}


def test_every_linked_file_is_there():
    for name in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / name).exists(), name


def test_the_reward_and_advantage_examples_stand_in_a_configuration(modules):
    overrides = [
        "rewards=[vision.temporal_iou,tag_format,{name: 'my_rewards:short_answer', weight: 0.2, limit: 60}]",
        "advantage=[total,'my_advantages:group_median']",
    ]
    check(load("charades_sta_tempsamp.yaml", overrides, Config))


def test_the_advantage_example_subtracts_the_median(modules):
    from my_advantages import group_median

    # Two groups: the median of 1, 0, 4 is 1, that of 2, 6, 3 is 3.
    table = group_median(reward_table([1.0, 0.0, 4.0, 2.0, 6.0, 3.0], group="aaabbb"))
    assert table.values.flatten().tolist() == [0.0, -1.0, 3.0, -1.0, 3.0, 0.0]


def test_the_commands_are_those_of_the_makefile():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets == {"demo", "test"} == set(re.findall(r"^make (\w+)", README, re.MULTILINE))
