"""The page of a run: it needs nothing but itself, and tells the essential first."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import math
import re

import pyarrow
import pytest
from markupsafe import Markup
from pyarrow import parquet

from mmrl.config.schema import ConfigError
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.reporting.html import document, find_run, metric_table, write_comparison, write_page
from mmrl.reporting.html.layout import HERE, amount, table
from mmrl.reporting.html.pages import run_page, weights_of
from mmrl.reporting.html.run_folder import read_run
from mmrl.reporting.metrics import Journal
from mmrl.training.loop import train
from tests.support.quick import draw_curves
from tests.support.toys import toy_run


@pytest.fixture(autouse=True, scope="module")
def drawn():
    with pytest.MonkeyPatch.context() as patch:
        draw_curves(patch)
        yield


def exclaim(measured):
    """A visualization: a fragment about what was measured."""
    return "".join(
        f"<figure>{name}: {len(found.rollouts)} rollouts!</figure>" for name, found in measured.items()
    )


def smoke(records):
    """A check while training that always finds something."""
    from mmrl.diagnostics.context import Finding

    return [Finding("smoke < 1")]


def sick(examined):
    """A check at the start that always finds something."""
    from mmrl.diagnostics.context import Finding

    return [Finding("a fever", "stay in bed")]


def outside(text: str) -> list[str]:
    """List what a page would fetch."""
    return re.findall(
        r"""(?:src|href|url\(|@import|srcset|data)\s*[=(]\s*["']?\s*((?:https?:)?//[^\s"'>)]*)""", text
    )


class Tags(html.parser.HTMLParser):
    """Notes elements that are closed otherwise than they were opened."""

    ALONE = {"meta", "link", "img", "input", "line", "circle", "path", "polygon"}
    OPTIONAL = {"html"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.wrong, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.ALONE and tag != "wbr":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append((tag, self.getpos()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with everything a page can show."""
    run = toy_run(
        tmp_path_factory.mktemp("runs") / "a<b",
        references={"ref": "frozen"},
        objective={"penalty": ["k3"]},
        evaluation={"data": {"name": "tests.support.toys:prompts", "num": 3}, "num_generations": 2},
        report={
            "trackers": [],
            "visualizations": [f"{__name__}:exclaim"],
            "checks": [f"{__name__}:smoke"],
            "startup_checks": [f"{__name__}:sick"],
        },
        eval_steps=1,
        max_steps=4,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.training.evaluate.RESAMPLES", 20)
        train(run)
    return run


def test_what_a_page_would_fetch_is_noticed():
    assert outside('<img src="https://a/b.png">') == ["https://a/b.png"]
    assert outside("<link href='//a/b.css'>") == ["//a/b.css"]
    assert outside("<img src='data:image/png;base64,iVBO//x'><a href='#x'>") == []


def test_the_page_is_self_contained_and_shows_what_there_is(finished):
    text = (finished.folder / "report.html").read_text()
    assert outside(text) == []
    tags = Tags(text)
    assert tags.wrong == [] and tags.open == []
    links = re.findall(r"<a href='#([\w-]+)'>", text)
    assert links == ["held-out", "rewards", "curves", "visualizations", "samples", "configuration"]
    assert set(links) <= set(tags.ids) and len(set(tags.ids)) == len(tags.ids)
    assert "<h1>a&lt;b</h1>" in text and "4 of 4 steps taken, 4 updates, 4 steps reported" in text
    for title in (
        "reward",
        "entropy",
        "steps of a rollout",
        "share of the advantage",
    ):
        assert f"{title}</figcaption>" in text
    assert "errors of rewards" not in text, "there are none"
    assert text.count("<svg") == text.count("</svg>")
    assert "answer: 6 rollouts!" in text
    low, high = finished.final.intervals["brevity"]
    assert f"{finished.final.metrics['brevity']:.3f} <small>{low:.3f} – {high:.3f}</small>" in text
    assert "name: tests.support.toys:brevity" in text, "the configuration"
    assert text.count("<article class=sample") == 4 * 16


def test_warnings_and_the_doctor_come_first(finished):
    text = (finished.folder / "report.html").read_text()
    places = [
        text.index(one) for one in ("<h1>", "<li>smoke &lt; 1</li>", "a fever; stay in bed", ">Held out<")
    ]
    assert places == sorted(places)
    assert text.count("smoke &lt; 1") == 1
    assert "Checks at the start" in text


def test_a_page_is_drawn_anew_from_the_folder_alone(finished):
    before = (finished.folder / "report.html").read_text()
    (finished.folder / "report.html").unlink()
    assert write_page(finished.folder).read_text() == before
    other = finished.folder / "deep" / "page.html"
    assert write_page(finished.folder, other) == other
    assert other.read_text().replace("../predictions.html", "predictions.html") == before


def test_a_healthy_run_says_that_the_doctor_looked(tmp_path):
    run = toy_run(tmp_path, max_steps=1)
    train(run)
    text = (tmp_path / "report.html").read_text()
    assert "Checks at the start (rewards_apply, zero_variance_groups, " in text
    assert "found nothing wrong" in text
    assert "role=alert" not in text
    assert "Held out" not in text


def test_a_folder_without_anything_has_a_page_as_well(tmp_path):
    text = write_page(tmp_path).read_text()
    assert "0 steps taken, 0 steps reported" in text and "Held out" not in text and "class=tiles" not in text


def test_a_component_has_a_line_with_weight_spread_and_share(tmp_path):
    journal = Journal(tmp_path)
    for step in range(20):
        numbers = {"mean": step / 10, "group_std": 0.5, "advantage_share": 0.75}
        journal.write({"step": step, "reward": 0.0, **{f"rewards/right/{k}": v for k, v in numbers.items()}})
    (tmp_path / "config.yaml").write_text("rewards: [{name: 'vision.right', weight: 2}]\n")
    text = run_page(read_run(tmp_path))
    row = re.search(r"<tr><th>right</th>(.*?)</tr>", text)[1]
    # A tenth is two records: the first are 0 and .1, the last 1.8 and 1.9.
    assert re.findall(r"<td>(.*?)</td>", row) == ["2", "0.0500", "1.85", "0.500", "75 %"]


def test_what_a_comparison_measures_is_no_line_of_the_rewards(tmp_path):
    numbers = {"rewards/math/short/mean": 1.0, "rewards/chosen": 0.2, "rewards/margins": 0.1}
    Journal(tmp_path).write({"step": 0, **numbers})
    rows = run_page(read_run(tmp_path)).partition("<th>weight</th>")[2].partition("</table>")[0]
    names = [re.sub("<.*?>", "", name) for name in re.findall(r"<tr><th>(.*?)</th>", rows)]
    assert names == ["math/short"]


def test_rewards_are_named_as_metrics_name_them():
    config = {"rewards": ["vision.iou", {"name": "mine:score", "weight": 0.5}, {"name": "x", "label": "y"}]}
    assert weights_of(config) == {"iou": 1.0, "score": 0.5, "y": 1.0}
    assert weights_of({}) == {}


# ---- reading


def test_the_last_evaluation_is_read_from_its_file_or_from_the_journal(tmp_path):
    journal = Journal(tmp_path)
    journal.write({"step": 0, "eval_score": 0.5, "eval_score/low": 0.25, "eval_score/high": 0.75})
    journal.write({"step": 1, "eval_score": 0.625, "eval_length": 3.0})
    journal.write({"step": 2, "reward": 1.0})
    found = read_run(tmp_path)
    assert (found.metrics, found.intervals) == ({"score": 0.625, "length": 3.0}, {})
    written = {"metrics": {"score": 1.0}, "intervals": {"score": [0.5, 1.5]}}
    (tmp_path / "evaluation.json").write_text(json.dumps(written))
    found = read_run(tmp_path)
    assert (found.metrics, found.intervals) == ({"score": 1.0}, {"score": [0.5, 1.5]})
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read .*evaluation.json"):
        read_run(tmp_path)


def test_numbers_of_the_start_and_the_end_pass_over_gaps(tmp_path):
    journal = Journal(tmp_path)
    for step, kl in enumerate([math.nan, 1.0, 2.0, math.nan]):
        journal.write({"step": 2 * step, "kl": kl})
    found = read_run(tmp_path)
    assert (*found.ends("kl"), found.done) == (1.0, 2.0, 7)
    assert all(map(math.isnan, found.ends("reward")))


def test_a_folder_that_holds_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder '.*nowhere'; name the output_dir"):
        find_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="it has no metrics.jsonl$"):
        find_run(tmp_path)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="it holds the runs inside"):
        find_run(tmp_path)
    with pytest.raises(ConfigError, match="has no finished step in its metrics.jsonl"):
        find_run(tmp_path / "inside")


# ---- parts


def test_evaluations_stand_side_by_side():
    one = Measured({"score_a": 0.5, "size": 20000.0}, {"score_a": (0.25, 0.75)}, (), RewardTable.empty())
    two = Measured({"other": 1.0, "tiny": 2.5e-5}, {}, (), RewardTable.empty())
    text = metric_table({"one": one, "<two>": two})
    rows = [re.sub(r"<[^>]*>", " ", row).split() for row in text.split("<tr>")[1:]]
    assert rows == [
        ["one", "&lt;two&gt;"], ["score_", "a", "0.500", "0.250", "–", "0.750"], ["size", "20,000"],
        ["other", "1.000"], ["tiny", "2.5e-5"],
    ]  # fmt: skip


def test_a_document_holds_its_style_and_its_script():
    text = document("a<b", ["<p>x</p>"])
    assert "<title>a&lt;b</title>" in text and ".sample" in text and "data-points" in text
    assert outside(text) == [] and Tags(text).wrong == []


EVIL = "<script>alert(1)</script>'\"><img src=x onerror=alert(1)>"


class Elements(html.parser.HTMLParser):
    """Lists the elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def plant(folder, *, length=2, record=(), warning=EVIL, metric=0.5):
    """Write a run's folder in which every text is an attack."""
    (folder / "completions").mkdir(parents=True)
    texts = {name: [EVIL, EVIL] for name in ("uid", "prompt", "completion", EVIL)}
    numbers = {
        "on_policy": [True, False],
        "length": [length] * 2,
        "advantage": [0.0, 0.0],
        "reward": [1.0, 0.0],
    }
    numbers |= {f"reward/{EVIL}": [1.0, None], "reward/other": [0.0, 1.0]}
    path = folder / "completions" / "completions_000000.parquet"
    parquet.write_table(pyarrow.table({**texts, **numbers}), path)
    journal = Journal(folder)
    for step in range(3):
        named = {name: step + 0.5 for name in (EVIL, f"rewards/{EVIL}/mean", f"time/{EVIL}", f"eval_{EVIL}")}
        journal.write(
            {"step": step, "reward": 1.0, "step_time": 3.0, "kl": 0.1 * step, **named, **dict(record)}
        )
    Journal(folder, "warnings.jsonl").write({"step": 0, "text": warning, "by": EVIL})
    Journal(folder, "warnings.jsonl").write({"step": 0, "text": warning, "by": "doctor"})
    measured = {"metrics": {EVIL: metric, "b": 1.0}, "intervals": {EVIL: [0.1, 0.9]}}
    (folder / "evaluation.json").write_text(json.dumps(measured))
    config = {"policy": EVIL, "objective": {"name": EVIL}, "seed": EVIL, EVIL: EVIL,
              "report": {"startup_checks": [EVIL]}, "rewards": [{"name": "a", "label": EVIL}]}  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


def harmless(text: str) -> None:
    elements = Elements(text).found
    assert len([tag for tag, _ in elements if tag == "script"]) == 1
    assert not [
        tag for tag, attributes in elements if "onerror" in attributes or attributes.get("src") == "x"
    ]
    assert EVIL not in text and "&lt;script&gt;alert(1)" in text


def test_everything_that_comes_from_files_is_escaped(tmp_path):
    folders = [plant(tmp_path / f"a{place}<script>alert(1)<" / "run") for place in range(2)]
    named = plant(tmp_path / "<img src=x onerror=alert(1)>")
    for folder in (*folders, named):
        harmless(write_page(folder).read_text())
    harmless(write_comparison([*folders, named], tmp_path / "compared.html").read_text())


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ({"length": EVIL}, r"000000\.parquet\[0\]: 'length' must be a number, not '<script>"),
        ({"record": {"kl": EVIL}}, r"metrics\.jsonl:1: 'kl' must be a number"),
        ({"warning": 3}, r"warnings\.jsonl:1: 'text' must be a text, not 3"),
        ({"metric": EVIL}, r"evaluation\.json.* must be a number"),
    ],
)
def test_what_should_be_a_number_and_is_none_is_an_error_that_names_the_place(tmp_path, planted, message):
    with pytest.raises(ConfigError, match=message):
        write_page(plant(tmp_path / "run", **planted))


@pytest.mark.parametrize(
    "column", ["prompt", "completion", "seen", "made", "advantage", "reward", "on_policy"]
)
def test_columns_of_other_types_are_errors_that_name_them(tmp_path, column):
    path = plant(tmp_path / "run") / "completions" / "completions_000000.parquet"
    wrong = [7, 7] if column in ("prompt", "completion") else [EVIL, EVIL]
    table = parquet.read_table(path)
    columns = {**table.to_pydict(), column: wrong}
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(ConfigError, match=rf"parquet\[0\]: '{column}' must be"):
        write_page(tmp_path / "run")


def test_a_completions_file_without_a_step_is_an_error(tmp_path):
    run = plant(tmp_path / "run")
    (run / "completions" / "completions_<b>.parquet").touch()
    with pytest.raises(ConfigError, match="names no step"):
        write_page(run)


def test_only_the_script_of_the_page_may_run():
    text = document("a", [])
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [a["content"] for tag, a in Elements(text).found if a.get("http-equiv")]
    assert policy.startswith("default-src 'none';") and policy.endswith(f"script-src 'sha256-{digest}'")


# ---- narrow screens


def test_tables_scroll_inside_their_box_and_names_break_after_their_marks():
    drawn = table(["", "a_b<c"], [["rollout.engine[0].max_length", "1"], [Markup("<b>x_y</b>"), "2"]])
    assert drawn.strip().startswith("<div class=wide tabindex=0><table>")
    assert "<th>a_<wbr>b&lt;c</th>" in drawn, "escaped before it is broken"
    assert "<th>rollout.<wbr>engine[0].<wbr>max_<wbr>length</th>" in drawn
    assert "<th><b>x_y</b></th>" in drawn, "HTML stays as it is"
    style = (HERE / "style.css").read_text()
    assert re.search(r"^\.wide \{ overflow-x: auto;.* max-width: 100%;", style, re.MULTILINE)
    assert re.search(r"^th:first-child \{ position: sticky; left: 0; background: #fff;", style, re.MULTILINE)
    assert 'name=viewport content="width=device-width' in document("title")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(0.0, "0"), (0.30000000000000004, "0.3"), (8.0, "8"), (0.01312, "0.0131"), (999.4, "999"), (999.9, "1k"),
     (1234.5, "1.23k"), (9.243e7, "92.4M"), (2e12, "2T"), (-5e9, "-5G"), (math.nan, "–")],
)  # fmt: skip
def test_amounts_are_written_short(value, wanted):
    assert amount(value) == wanted
