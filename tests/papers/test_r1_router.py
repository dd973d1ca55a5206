"""Rewards of stepwise retrieval: the route with a tiny embedding model, and the recall of answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from pyarrow import parquet

from mmrl.build import build
from mmrl.config.loading import read
from mmrl.config.schema import Config, parse
from mmrl.core.tool_calls import Call
from mmrl.core.types import Outcome, Prompt, Trajectory
from mmrl.papers.r1_router import RouteReward, answer_recall, routes
from mmrl.reporting import html
from mmrl.training.collect import collect
from mmrl.training.loop import train
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.policies.tokens import Tokens
from tests.rewards.tiny_text import write_bert

CONFIGS = Path(__file__).parents[2] / "configs"

TARGET = {"query": "Who painted it?", "retriever": ["Text Image Retriever"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def route(folder):
    return RouteReward(model=folder, device="cpu")


def of(route, *texts, target=TARGET):
    return route([Prompt("a", (), target)] * len(texts), [Outcome(text=text) for text in texts])


def step(query, retriever):
    return f"<think>so</think>\n<sub-question>{query}</sub-question>\n<ret> {retriever} </ret>"


def test_half_is_for_the_question_and_half_for_the_retriever(route):
    same, other = "WHO painted it?", "when was he born"
    near = float(route.embed(["who painted it?"])[0] @ route.embed([other])[0])
    assert -1 <= near < 0.95
    right, wrong = "Text Image Retriever", "table retriever"
    found = of(route, step(same, right), step(same, wrong), step(other, right), step(other, wrong))
    assert found == pytest.approx([1, 0.5, 0.5 * near + 0.5, 0.5 * near], abs=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "<sub-question>who painted it?</sub-question><ret>text image retriever</ret>",
        "<think>so</think><ret>text image retriever</ret>",
        "<think>so</think><sub-question>who painted it?</sub-question>",
        step("who painted it?", "the web"),
        step("who painted it?", "none, text image retriever"),
        step("who painted it?", ""),
    ],
)
def test_a_step_that_is_not_well_formed_earns_0(route, text):
    assert of(route, text) == [0]


def test_two_retrievers_are_no_route(route):
    assert of(route, step("who painted it?", "text retriever, text image retriever")) == pytest.approx([0.5])


def test_none_may_be_the_target(route):
    target = {"query": "None", "retriever": ["none"]}
    assert of(route, step("none", "None"), target=target) == pytest.approx([1])


def test_batches_and_padding_do_not_matter(folder, route):
    texts = ["who painted it?", "when was he born", "he"]
    one_by_one = RouteReward(model=folder, device="cpu", batch_size=1)
    torch.testing.assert_close(route.embed(texts), one_by_one.embed(texts), rtol=0, atol=1e-5)
    means = [
        RouteReward(model=folder, device="cpu", batch_size=n, pooling="mean").embed(texts) for n in (1, 3)
    ]
    torch.testing.assert_close(*means, rtol=0, atol=1e-5)
    assert not torch.allclose(means[0], route.embed(texts), atol=1e-2)


def test_other_steps_are_not_scored(route):
    assert of(route, step("who painted it?", "none"), target="Rembrandt") == [None]
    assert answer_recall([Prompt("a", (), TARGET)], [Outcome(text="<answer>x</answer>")]) == [None]


# ---- the recall of answers


def recall(text, target):
    return answer_recall([Prompt("a", (), target)], [Outcome(text=text)])[0]


def say(text):
    return f"<think>so</think><answer>{text}</answer>"


def test_a_short_answer_wants_every_word():
    assert recall(say("It was Rembrandt van Rijn."), "rembrandt van rijn") == 1
    assert recall(say("Rembrandt"), "rembrandt van rijn") == 0
    assert recall(say("two"), "2") == 1


def test_a_long_answer_earns_its_recall():
    target = "he was born in Leiden in 1606"  # seven words, of which `in` is twice
    assert recall(say(target), target) == 1
    assert recall(say("in Leiden, 1606"), target) == pytest.approx(3 / 7)
    assert recall(say("in Leiden, in 1606"), target) == pytest.approx(4 / 7)


def test_of_several_answers_that_of_the_best_f1_counts():
    several = ("the Night Watch of Rembrandt in Amsterdam", "Night Watch")
    # F1 of the second is 1, of the first 2 * 2 / (2 + 6).
    assert recall(say("the night watch"), several) == 1
    # F1 of the first is 2 * 5 / (5 + 6), of the second 2 * 2 / (5 + 2); 5 of 6 words are not full recall.
    assert recall(say("night watch of rembrandt amsterdam"), several) == 0


@pytest.mark.parametrize(
    "text", [None, "", "Rembrandt", "<answer>Rembrandt</answer>", "<think>Rembrandt</think>"]
)
def test_a_missing_block_earns_0(text):
    assert recall(text, "Rembrandt") == 0


def test_an_answer_without_a_word_earns_0():
    assert recall(say("..."), "Rembrandt") == 0
    assert recall(say("..."), "...") == 0


# ---- the loop


TURNS = (
    [step("who painted it?", "Text Image Retriever"), step("None", "none"), say("Rembrandt")],
    [
        step("who painted it?", "Text Retriever"),
        step("None", "none"),
        step("where was he born", "Table Retriever"),
        say("nobody"),
    ],
)


class Scripted:
    """An engine whose conversations of odd and even numbers say `TURNS`."""

    notes = frozenset({"logp", "token", "temperature"})
    batch_size, max_completion_length = 0, 200

    def __init__(self, policy: Tokens) -> None:
        self.policy, self.turn = policy, 0

    def converse(self):
        self.turn = 0
        return self

    def rollout(self, prompts):
        raise AssertionError("only turns are asked for")

    def sample(self, requests):
        rows = [self._row(request, TURNS[request.index % 2][self.turn]) for request in requests]
        self.turn += 1
        return tuple(rows)

    def _row(self, request, text):
        ids = self.policy.prompt_encoder.answer(text)
        outcome = Outcome(text=text, end=len(ids), tags={"finish": "stop"})
        notes = {"logp": torch.full((len(ids),), -1.0), "token": ids, "temperature": torch.ones(len(ids))}
        row = TokenRow(request.encoded, ids)
        return Trajectory(request.prompt, request.prompt.uid, (outcome,), row, len(ids), notes)


@pytest.fixture
def loop(checkpoint, folder, tmp_path):
    """Plan two steps of the shipped loop with a tiny model, over three small corpora."""
    for name, colour in (("night", "black"), ("crab", "red")):
        Image.new("RGB", (56, 56), colour).save(tmp_path / f"{name}.png")
    steps = [{"query": "Who painted it?", "retriever": "Text Image Retriever"}]
    steps += [{"query": "None", "retriever": ["none"]}]
    question = {"image": "night.png", "question": "What?", "answer": "Rembrandt", "steps": steps}
    files = {
        "questions": [{**question, "id": "a"}],
        "texts": [{"text": "who painted it? Rembrandt painted it"}, {"text": "a crab"}],
        "images": [
            {"image": "crab.png", "caption": "a crab"},
            {"image": "night.png", "caption": "Rembrandt painted it"},
        ],
        "tables": [{"name": "Rembrandt", "born": "Leiden"}, {"name": "Vermeer", "born": "Delft"}],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = read(CONFIGS / "train" / "r1_router_loop.yaml")
    engine = raw["rollout"]["engine"][1]
    assert engine["name"] == "vision.with_retrievers"
    tools = [{**tool, "path": str(tmp_path / Path(tool["path"]).name)} for tool in engine["tool"]]
    tools[1].pop("model")  # captions are searched by their words
    changes = {
        "policy": {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float32"},
        "data": {"name": "vision.visual_qa", "path": str(tmp_path / "questions.jsonl")},
        "rewards": [{**raw["rewards"][0], "model": folder, "device": "cpu"}, "answer_recall"],
        "rollout": {
            "engine": [f"{__name__}:Scripted", {**engine, "tool": tools, "max_context": 4000}],
            "num_prompts": 1,
            "num_generations": 2,
        },
        "learn": {"learning_rate": 0.01},
        "report": {"trackers": []},
        "max_steps": 2,
        "output_dir": str(tmp_path / "run"),
    }
    return {**raw, **changes, "rollout": {**raw["rollout"], **changes["rollout"]}}


def test_a_turn_of_the_loop_earns_what_its_step_is_worth(loop, monkeypatch):
    monkeypatch.setattr(html, "write_page", lambda folder: folder)
    run = build(parse(loop, Config), quiet=True)
    run.tick(0)
    table = collect(run).table
    # The route of every turn by hand: right, `none` is right; a wrong retriever, `none`, a step too many.
    nan = torch.nan
    wanted = torch.tensor([[1, 1, nan, nan], [0.5, 1, 0, nan]], dtype=torch.float64)
    torch.testing.assert_close(table.scored["route_reward"], wanted, atol=1e-5, rtol=0, equal_nan=True)
    assert table.at_end("answer_recall").tolist() == [1, 0]
    # Turns are compared with turns: (1, 1, 1) and (0.5, 1, 0, 0); a deviation of 0.25 and 0.5 times root 2.
    half = 0.5**0.5
    credit = run.advantage(table).values[:, 0].tolist()
    assert credit[0][:3] == pytest.approx([half, 0, half], abs=1e-4)
    assert credit[1] == pytest.approx([-half, 0, -half, 0], abs=1e-4)
    train(run)
    records = [record for record in run.journal.read() if "tools/calls" in record]
    assert len(records) == 2 and all(record["tools/calls"] == 2.5 for record in records)
    assert all(record["tools/errors"] == 0 for record in records)
    (path, *_) = sorted((run.folder / "completions").glob("*.parquet"))
    first, second = parquet.read_table(path).column("conversation").to_pylist()
    assert "<image: " in first and "Rembrandt painted it" in first and "Nothing is left" in first
    assert "who painted it? Rembrandt painted it" in second and "<image: " not in second
    assert "name: Rembrandt; born: Leiden" in second


def test_a_turn_calls_the_retrievers_that_it_names():
    query = {"query": "who painted it?"}
    assert routes(step("who painted it?", "Text  Retriever")) == [Call("text_retriever", query)]
    assert [call.name for call in routes(step("who", "none, table retriever"))] == ["none", "table_retriever"]
    called = '<tool_call>{"name": "text_retriever", "arguments": {"query": "who painted it?"}}</tool_call>'
    assert routes(called) == [Call("text_retriever", query)]
    assert routes(say("Rembrandt")) == routes("<ret>none</ret>") == []
