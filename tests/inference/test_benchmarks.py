"""Evaluation with lmms-eval and VLMEvalKit: options, prompts, scores; lmms-eval itself on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.vllm_servers import serving
from mmrl import load_engine
from mmrl.cli import main
from mmrl.config.loading import ConfigError
from mmrl.config.schema import EvaluateConfig, Evaluation, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt, Trajectory
from mmrl.data.media_reader import MediaReader
from mmrl.inference.benchmark_model import BenchmarkModel, prompt_from, sampling_of
from mmrl.inference.benchmark_scores import summarize, with_scores
from mmrl.inference.lmms_eval import scored_rows
from mmrl.inference.vlmeval import totals_of
from mmrl.reporting.predictions import read_predictions
from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl
from tests.support.lmms_tasks import write_tasks

HOME, VLLM = os.environ.get("MMRL_LMMS", ""), os.environ.get("MMRL_VLLM", "")
CONFIG = EvaluateConfig(Piece("vision.tokens"), Evaluation())


def row(uid: str, text: str = "yes") -> Trajectory:
    prompt = Prompt(uid, (Message("user", (Part("q"),)),))
    return Trajectory(prompt, uid, (Outcome(text, tags={"finish": "stop"}),), None, 1)


def test_generation_kwargs_are_honoured_or_refused_by_name():
    task = {"max_new_tokens": 16, "temperature": 0, "top_p": 1.0, "num_beams": 1, "do_sample": False}
    assert sampling_of(task, "t") == ({"temperature": 0.0, "max_completion_length": 16}, ())
    assert sampling_of({}, "t") == ({"temperature": 0.0}, ())
    assert sampling_of({"do_sample": False, "temperature": 0.2}, "t")[0] == {"temperature": 0.0}
    drawn = {"do_sample": True, "top_p": 0.9, "top_k": 5, "until": ["\n\n", "Q:"]}
    assert sampling_of(drawn, "t") == ({"temperature": 1.0, "top_p": 0.9, "top_k": 5}, ("Q:",))
    assert sampling_of({"temperature": 0, "top_p": 0, "until": "END"}, "t") == (
        {"temperature": 0.0},
        ("END",),
    )
    with pytest.raises(ConfigError, match="t: no engine of mmrl has the generation kwarg `num_beams: 4`"):
        sampling_of({"num_beams": 4}, "t")
    with pytest.raises(ConfigError, match="`seed: 0`"):
        sampling_of({"seed": 0}, "t")


def test_what_only_llava_reads_is_named_once(caplog):
    for _ in range(2):
        assert sampling_of({"image_aspect_ratio": "pad"}, "once") == ({"temperature": 0.0}, ())
    assert caplog.text.count("`image_aspect_ratio` is read by LLaVA only") == 1


def test_prompts_keep_texts_and_order_and_refuse_what_they_cannot_read():
    image = Image.new("RGB", (28, 28), "red")
    parts = [{"type": "text", "text": "<image 1>"}, {"type": "image", "url": image}]
    prompt = prompt_from(
        "t/0", [{"role": "user", "content": [*parts, {"type": "text", "value": "<image>"}]}], MediaReader()
    )
    assert [part.text or part.media.kind for part in prompt.messages[0].parts] == [
        "<image 1>",
        "image",
        "<image>",
    ]
    for bad in (
        {"type": "video", "url": {"url": "a.mp4", "video_start": 1}},
        {"type": "video", "url": "a.mp4", "start_time": 3.0},
        {"type": "depth", "url": image},
    ):
        with pytest.raises(ConfigError, match="'t/1': mmrl cannot read this part"):
            prompt_from("t/1", [{"content": [bad]}], MediaReader())


def sample(number: int, **metrics) -> dict:
    fixed = {"doc": {}, "arguments": [], "resps": [["yes"]], "token_counts": [], "doc_hash": "0"}
    return {"doc_id": number, "target": "A", "filtered_resps": ["yes"], **fixed, **metrics}


def test_logged_samples_become_rewards_and_totals():
    rows = {("t", i): row(f"t/{i}") for i in range(4)}
    hits = [1.0, 0.0, 1.0, 1.0]
    logged = [
        sample(i, acc=hit, mme={"score": hit, "category": "x"}, f1=["A", 1]) for i, hit in enumerate(hits)
    ]
    results = {"acc,none": 0.75, "acc_stderr,none": "N/A", "mme,none": 75.0, "f1,none": 0.3, "alias": "t"}
    scored, totals = scored_rows("t", logged, results, rows)
    assert totals == {"acc": 0.75, "mme": 75.0, "f1": 0.3}
    assert scored[1].outcomes[-1].recorded == {"acc": 0.0, "mme": 0.0}
    assert json.loads(scored[0].logged["f1"]) == ["A", 1] and scored[0].prompt.target == "A"
    measured, missing = summarize(scored, totals, (), None, CONFIG)
    # acc is the mean of the scores and has its interval; a percentage and F1 are theirs alone.
    assert measured.metrics["acc"] == 0.75 and measured.metrics["mme"] == 75.0
    assert measured.metrics["mme/mean"] == 0.75 and measured.metrics["f1"] == 0.3
    low, high = measured.intervals["acc"]
    assert low < 0.75 < high and measured.intervals["mme/mean"] == (low, high)
    assert missing == ("mme", "f1")


def test_filters_keep_their_scores_apart():
    logged = [sample(0, acc=1.0), sample(0, acc=0.0)]
    logged[1]["filtered_resps"] = ["y"]
    results = {"acc,strict": 1.0, "acc,loose": 0.0}
    (scored,), totals = scored_rows("t", logged, results, {("t", 0): row("t/0")})
    assert scored.outcomes[-1].recorded == {"acc,strict": 1.0, "acc,loose": 0.0} and totals == results | {}
    assert scored.logged["filtered,loose"] == "y"


def test_an_interval_of_zeros_needs_a_total_that_is_known_to_be_a_mean():
    rows = [with_scores(row(f"t/{i}"), {"acc": 0}, None) for i in range(5)]
    measured, missing = summarize(rows, {"acc": 0.0}, ("acc",), None, CONFIG)
    # Wilson's interval of 0 of 5 at 95 %: z^2 / (n + z^2) = 3.8415 / 8.8415
    assert measured.intervals["acc"] == pytest.approx((0.0, 0.43449), abs=1e-4) and not missing
    assert summarize(rows, {"acc": 0.0}, (), None, CONFIG)[1] == ("acc",)


def test_totals_of_vlmeval_are_the_numbers_of_its_tables():
    class Table:
        def to_dict(self, how):
            assert how == "records"
            return [{"split": "dev", "Overall": 0.5}, {"split": "test", "Overall": 0.25}]

    assert totals_of(Table()) == {"dev/Overall": 0.5, "test/Overall": 0.25}
    assert totals_of({"Overall": 71, "note": "x"}) == {"Overall": 71.0} and totals_of(None) == {}


STAND_IN = {
    "__init__": "",
    "smp": """
import csv
def dump(table, file):
    table.to_csv(file, sep="\\t", index=False, quoting=csv.QUOTE_ALL)
""",
    "dataset": """
import pandas
from vlmeval.smp import dump
class Data:
    MODALITY = "IMAGE"
    def __init__(self, name):
        self.name = name
        self.data = pandas.DataFrame({"index": [3, 5], "question": ["a?", "b?"], "answer": ["x", "y"]})
    def build_prompt(self, line):
        return [{"type": "text", "value": line["question"]}]
    def evaluate(self, file, model, nproc):
        if self.name == "no_scoring":
            raise NotImplementedError
        table = pandas.read_csv(file, sep="\\t", keep_default_na=False)
        table["hit"] = [int("right" in text) for text in table["prediction"]]
        dump(table, file.replace(".tsv", "_exact_matching_result.tsv"))
        return pandas.DataFrame({"split": ["dev"], "Overall": [table["hit"].mean()]})
def build_dataset(name):
    return None if name == "unknown" else Data(name)
""",
}


@pytest.fixture
def vlmeval(tmp_path, monkeypatch):
    """Put a package with the functions of VLMEvalKit that mmrl calls on the path; yield a command."""
    for name, text in STAND_IN.items():
        (tmp_path / "packages/vlmeval").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"packages/vlmeval/{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PRED_FORMAT", "")
    TinyQwen2_5Vl(stream=Stream(3), init=0.08).build(tmp_path / "model")
    yield ["evaluate", str(tmp_path / "model"), "--with", "vlmeval", f"output_dir={tmp_path / 'out'}"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "vlmeval"]:
        del sys.modules[name]


def test_answers_with_any_characters_are_scored_by_vlmeval(vlmeval, tmp_path, monkeypatch):
    texts = iter(['" right\r\tor', "wrong\r"])
    answered = BenchmarkModel.answer

    def answer(self, *given):
        rows = answered(self, *given)
        return tuple(replace(row, outcomes=(replace(row.outcomes[-1], text=next(texts)),)) for row in rows)

    monkeypatch.setattr(BenchmarkModel, "answer", answer)
    # The engine is that of evaluations; its answers have two tokens.
    engine = "evaluation.engine=[{name: vision.generate, max_completion_length: 2}]"
    assert not main([*vlmeval, "data=some", engine])
    found = json.loads((tmp_path / "out/some/evaluation.json").read_text())
    assert found["metrics"]["hit/mean"] == found["metrics"]["Overall"] == 0.5
    assert found["metrics"]["completions/mean_length"] <= 2


def test_what_vlmeval_cannot_score_is_named_and_what_it_scored_before_is_kept(vlmeval, tmp_path, capsys):
    engine = "evaluation.engine=[{name: vision.generate, max_completion_length: 2}]"
    assert main([*vlmeval, "data=some,unknown", engine]) == 2
    assert "vlmeval has no data set 'unknown'" in capsys.readouterr().err
    assert not (tmp_path / "out/some").exists()
    assert main([*vlmeval, "data=some", engine]) == 0, "a failure that wrote nothing leaves the folder free"
    other = f"output_dir={tmp_path / 'other'}"
    assert main([*vlmeval, "data=some,no_scoring", engine, other]) == 2
    assert "vlmeval has no scoring for 'no_scoring'" in capsys.readouterr().err
    assert (tmp_path / "other/some/evaluation.json").exists()
    assert main([*vlmeval, "data=some", engine, other]) == 2
    assert "part of another evaluation, which did not finish: vlmeval.data is" in capsys.readouterr().err
    assert main([*vlmeval, "data=some", engine]) == 0
    assert main([*vlmeval, "data=some", engine, "limit=1"]) == 2
    assert "out' holds another evaluation: vlmeval.limit is" in capsys.readouterr().err


@pytest.mark.parametrize("toolkit", ["lmms_eval", "vlmeval"])
def test_a_missing_toolkit_and_unknown_options_are_one_line(toolkit, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    option = {"lmms_eval": "task=x", "vlmeval": "data=x"}[toolkit]
    assert main(["evaluate", str(model), "--with", toolkit, option]) == 2
    assert "docs/howto/toolkits.md" in capsys.readouterr().err
    assert main(["evaluate", str(model), "--with", toolkit, "tsk=1"]) == 2
    assert f"there is no option 'tsk' of {toolkit}; there are" in capsys.readouterr().err
    assert main(["evaluate", str(model), "--with", toolkit, option, "limit=-1"]) == 2
    assert "'limit' must be at least 0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run_lmms(tmp_path_factory):
    """A function that runs `mmrl evaluate --with lmms_eval` on a tiny model in lmms-eval's environment."""
    folder = tmp_path_factory.mktemp("lmms")
    TinyQwen2_5Vl(stream=Stream(3), init=0.08).build(folder / "model")
    tasks = write_tasks(folder / "tasks")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment["HF_DATASETS_CACHE"] = str(folder / "cache")

    def run(*words: str, source: Path = folder / "model") -> subprocess.CompletedProcess:
        command = [
            f"{HOME}/bin/python",
            "-m",
            "mmrl",
            "evaluate",
            str(source),
            "--with",
            "lmms_eval",
        ]
        given = [f"include_path={tasks}", "policy.dtype=float32", *words]
        how = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
        return subprocess.run(command + given, check=False, **how)

    return folder, run


@pytest.mark.lmms
@pytest.mark.slow
@pytest.mark.skipif(not HOME, reason="MMRL_LMMS names no environment with lmms-eval")
def test_three_kinds_of_tasks_are_scored_by_lmms_eval(run_lmms):
    folder, run = run_lmms
    done = run("task=choice,free,span", f"output_dir={folder / 'out'}")
    assert done.returncode == 0, done.stderr
    found = {
        task: read_predictions(folder / "out" / task / "predictions.parquet").rows
        for task in ("choice", "free", "span")
    }
    measured = {task: json.loads((folder / "out" / task / "evaluation.json").read_text()) for task in found}
    texts = {row["uid"]: row["completion"] for row in found["choice"]}
    hits = [float("ABCD"[len(texts[f"choice/{i}"].strip()) % 4] == "ABCD"[i % 4]) for i in range(6)]
    assert measured["choice"]["metrics"]["acc"] == pytest.approx(sum(hits) / 6)
    assert set(measured["choice"]["intervals"]) == {"acc"} and "exact_match" in measured["free"]["intervals"]
    assert [row["target"] for row in sorted(found["free"], key=lambda row: row["uid"])] == list("012345")
    assert all(row["seen"] for row in found["span"]) and "iou/mean" in measured["span"]["intervals"]
    spans = [row["reward/iou"] for row in found["span"]]
    assert measured["span"]["metrics"]["iou"] == pytest.approx(100 * sum(spans) / 6)
    assert (folder / "out" / "choice" / "predictions.html").is_file()
    # The same questions by transformers alone.
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(folder / "model")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32)
    for number in (0, 3):
        doc = json.loads((folder / "tasks" / "choice.jsonl").read_text().splitlines()[number])
        content = [{"type": "image", "image": doc["image"]}, {"type": "text", "text": doc["question"]}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert texts[f"choice/{number}"] == processor.decode(made, skip_special_tokens=True)


@pytest.fixture(scope="module")
def adapter(run_lmms):
    """The folder of an adapter whose two matrices are random."""
    options = {"model": str(run_lmms[0] / "model"), "dtype": "float32", "lora_rank": 2}
    evaluation = Evaluation(engine=(Piece("vision.generate"),))
    session = load_engine(EvaluateConfig(Piece("vision.tokens", options), evaluation))
    torch.manual_seed(0)
    for name, weight in session.policy.module.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    session.policy.save(run_lmms[0] / "adapter")
    return run_lmms[0] / "adapter"


@pytest.mark.lmms
@pytest.mark.slow
@pytest.mark.skipif(not HOME, reason="MMRL_LMMS names no environment with lmms-eval")
@pytest.mark.parametrize(
    "words",
    [
        ["policy.transform=[{name: compression.yopo25}]"],
        ["rollout.engine.0.cache={name: compression.kivi, nbits: 1, q_group_size: 16, residual_length: 16}"],
        [],
    ],
    ids=["pruned", "cache of few bits", "adapter"],
)
def test_adapters_pruned_and_cached_models_answer_for_lmms_eval_as_in_this_process(
    run_lmms, adapter, words, tmp_path
):
    folder, run = run_lmms
    source = folder / "model" if words else adapter
    done = run("task=choice", f"output_dir={tmp_path}", *words, source=source)
    assert done.returncode == 0, done.stderr
    rows = read_predictions(tmp_path / "choice" / "predictions.parquet").rows
    here = ["policy.dtype=float32"]
    session = load_engine(source, [*here, *words], temperature=0, max_completion_length=12)
    whole = load_engine(folder / "model", here, temperature=0, max_completion_length=12)
    docs = [json.loads(line) for line in (folder / "tasks" / "choice.jsonl").read_text().splitlines()]
    texts = {row["uid"]: row["completion"] for row in rows}
    asked = [(doc["question"], [doc["image"]]) for doc in docs]
    wanted = [session.answer(question, images=images) for question, images in asked]
    assert [texts[f"choice/{i}"] for i in range(len(docs))] == wanted
    assert wanted != [whole.answer(question, images=images) for question, images in asked]


@pytest.mark.lmms
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not (HOME and VLLM), reason="MMRL_LMMS and MMRL_VLLM name no two environments")
def test_a_server_of_vllm_answers_for_lmms_eval_as_this_process_does(run_lmms, tmp_path):
    _, run = run_lmms
    model, tasks = tmp_path / "model", ("choice", "free", "span")
    # Heads of 32, which vLLM needs on a CPU.
    TinyQwen2_5Vl(stream=Stream(3), init=0.08, vision_width=128, max_pixels=140 * 140).build(model)
    policy = Piece("vision.tokens", {"model": str(model), "dtype": "float32"})
    with serving(VLLM, policy, 1, tmp_path) as (urls, _):
        engine = json.dumps([{"name": "vision.vllm", "servers": urls, "weights_folder": str(tmp_path / "w")}])
        words = [f"task={','.join(tasks)}", f"evaluation.engine={engine}"]
        served = run(*words, f"output_dir={tmp_path / 'served'}", source=model)
    assert served.returncode == 0, served.stderr
    done = run(words[0], f"output_dir={tmp_path / 'here'}", source=model)
    assert done.returncode == 0, done.stderr
    for task in tasks:
        both = [
            read_predictions(tmp_path / name / task / "predictions.parquet").rows
            for name in ("served", "here")
        ]
        texts, wanted = ({row["uid"]: row["completion"] for row in rows} for rows in both)
        assert texts == wanted and len({*texts.values()}) > 1


@pytest.mark.lmms
@pytest.mark.slow
@pytest.mark.skipif(not HOME, reason="MMRL_LMMS names no environment with lmms-eval")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["task=choise"], "lmms_eval has no task 'choise'; did you mean 'choice'?"),
        (["task=mmmu_val"], "lmms_eval cannot load 'mmmu_val'"),
        (
            ["task=choice", "gen_kwargs=num_beams=4"],
            "no engine of mmrl has the generation kwarg `num_beams: 4`",
        ),
    ],
)
def test_what_lmms_eval_cannot_do_is_one_line(run_lmms, words, error):
    done = run_lmms[1](*words)
    assert done.returncode == 2 and error in done.stderr.splitlines()[-1]
