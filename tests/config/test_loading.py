"""`~` and `$NAME` in paths are what a shell makes of them, wherever a path is given."""

from __future__ import annotations

import pytest

from mmrl.build import load_engine
from mmrl.cli import main
from mmrl.config.loading import ConfigError, expanded, read
from mmrl.config.schema import BuildConfig, Config, load, parse
from mmrl.config.stages import load_stages
from tests.support.toys import plan


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name, value in {"HOME": str(tmp_path), "WHO": "me", "EMPTY": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("~/x", "{home}/x"),
        ("~", "{home}"),
        ("$HOME/my runs/x", "{home}/my runs/x"),
        ("my runs/$WHO", "my runs/me"),
        ("/scratch/$WHO/run-$WHO", "/scratch/me/run-me"),
        ("a/~/b", "a/~/b"),
        ("~5 words at most", "~5 words at most"),
        ("costs $WHO a lot", "costs $WHO a lot"),
        ("$x/2$", "$x/2$"),
        (r"$\frac{1}{2}$", r"$\frac{1}{2}$"),
        ("^a/b$", "^a/b$"),
        ("$NOWHERE", "$NOWHERE"),  # at a key that may hold any text
    ],
)
def test_a_path_is_expanded_and_another_text_is_not(home, text, wanted):
    assert expanded(text) == wanted.replace("{home}", home)


@pytest.mark.parametrize("text", ["$NOWHERE/x", "$EMPTY/x", "~nobody-is-called-so/x"])
def test_what_a_shell_would_leave_is_an_error(text):
    with pytest.raises(ConfigError, match="write the whole path"):
        expanded(text, "output_dir")


def test_a_file_with_such_a_name_stays_itself(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "$NOWHERE").write_text("")
    assert expanded("a/$NOWHERE") == "a/$NOWHERE"


def test_every_way_to_give_a_path(home, tmp_path, monkeypatch, capsys):
    raw = plan("~/run", policy={"name": "vision.tokens", "model": "~/m", "adapter": "$HOME/a"})
    raw |= {
        "init_from": "~/old",
        "data": {"name": "mixture", "data": [{"name": "vision.visual_qa", "path": "~/q"}]},
    }
    config = parse(raw, Config)
    assert (config.output_dir, config.init_from) == (f"{home}/run", f"{home}/old")
    assert config.policy.options == {"model": f"{home}/m", "adapter": f"{home}/a"}
    assert config.data.options["data"][0]["path"] == f"{home}/q"
    given = load(plan("x"), ["output_dir=$HOME/z"])
    assert given.output_dir == f"{home}/z"
    assert load_stages({**plan("~/s"), "stages": [{"name": "a"}]})[0].config.output_dir == f"{home}/s/1-a"
    (tmp_path / "build.yaml").write_text("build: {name: x, models: [~/a, $HOME/b]}\noutput: ~/data\n")
    built = load("~/build.yaml", kind=BuildConfig)
    assert (built.output, built.build.options["models"]) == (f"{home}/data", [f"{home}/a", f"{home}/b"])
    with pytest.raises(ConfigError, match=f"'{home}/none.yaml'"):
        load_engine("~/none.yaml")
    assert main(["report", "~/run"]) == 2 and f"'{home}/run'" in capsys.readouterr().err
    assert main(["train", "~/none.yaml"]) == 2 and f"{home}/none.yaml" in capsys.readouterr().err
    assert main(["export", "~/none.yaml", "$NOWHERE/x"]) == 2 and "NOWHERE" in capsys.readouterr().err
    assert not (tmp_path / "~").exists()


def test_a_method_is_included_after_the_files_and_below_the_file_itself(tmp_path):
    (tmp_path / "below.yaml").write_text(
        "rollout: {num_generations: 7, num_prompts: 5}\nadvantage: [total]\n"
    )
    (tmp_path / "run.yaml").write_text("include: [below.yaml]\nmethod: supervised\nmax_steps: 3\n")
    raw = read(tmp_path / "run.yaml")
    assert (raw["advantage"], raw["max_steps"], "method" in raw) == (["constant"], 3, False)
    assert raw["rollout"] == {"num_generations": 1, "num_prompts": 5, "engine": ["offline"]}
    assert read({"method": "supervised", "advantage": ["total"]})["advantage"] == ["total"]
    with pytest.raises(ConfigError, match="there is no method 'supervise'; did you mean 'supervised'"):
        read({"method": "supervise"})
    with pytest.raises(ConfigError, match="'method' must be a name, such as dapo, not 3"):
        read({"method": 3})
