"""Reward models: what they read, how their folders load elsewhere, and training as TRL does it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as t

from mmrl.build import build, check
from mmrl.config.loading import ConfigError, merge, read
from mmrl.config.schema import Config, parse
from mmrl.core.rng import seeded
from mmrl.core.types import Outcome
from mmrl.diagnostics.inputs import check_inputs
from mmrl.training.loop import train
from mmrl.vision.policies.reward_model import RewardModel
from mmrl.vision.rewards.reward_model import RewardModel as Reward
from tests.support.configs import method_file
from tests.support.distributed_worker import launch
from tests.vision import tiny
from tests.vision.test_text_only import TEMPLATE

PICTURE = tiny.picture()
PROMPT = tiny.ask("a", PICTURE, "the fox")
ANSWERS = [Outcome(text=text) for text in ("brown", "quick 0 1 2 3", "")]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def loaded(model, **options) -> RewardModel:
    with seeded(0):
        return RewardModel(model=str(model), **{"dtype": "float32", **options})


def scores_of(policy, outcomes=ANSWERS, prompt=PROMPT) -> torch.Tensor:
    with torch.no_grad():
        return policy.scores(tuple(policy.encode(prompt, one) for one in outcomes), 8)


def moved(policy) -> RewardModel:
    """Move everything that learns a little, so that it matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """Write a tiny language model of a family that has a class of classifiers."""
    folder = tmp_path_factory.mktemp("qwen2")
    tokenizer = tiny._tokenizer()
    tokenizer.chat_template = TEMPLATE
    with seeded(0):
        t.Qwen2ForCausalLM(t.Qwen2Config(**tiny.TEXT, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_score_is_read_at_the_last_token_of_the_conversation(checkpoint):
    policy = loaded(checkpoint("qwen2_5_vl"))
    processor = policy.tokens.processor
    pixels = PICTURE.load().pixels[0]
    content = [{"type": "image", "image": pixels}, {"type": "text", "text": "the fox"}]
    chat = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "brown"}]},
    ]
    inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
    row = policy.encode(PROMPT, ANSWERS[0])
    assert torch.equal(row.steps.prompt.ids, inputs["input_ids"][0])
    with torch.no_grad():
        last = policy.tokens.core(**inputs).last_hidden_state[0, -1]
    wanted = (policy.scorer.head.weight @ last).double()
    torch.testing.assert_close(scores_of(policy)[0], wanted, **CLOSE)


def test_a_common_image_is_computed_once_with_equal_scores_and_gradients(checkpoint):
    grown = []
    for share in (True, False):
        policy = loaded(checkpoint("qwen2_5_vl"), share_prefix=share, lora_rank=2)
        batch = policy.collate(tuple(policy.encode(PROMPT, one) for one in ANSWERS))
        output = policy(batch, frozenset({"score"}))
        assert output.logp.shape == output.extra["score"].shape == (3, 1)
        output.extra["score"].square().sum().backward()
        grown.append([output.extra["score"].detach(), policy.scorer.head.weight.grad])
    for shared, apart in zip(*grown, strict=True):
        torch.testing.assert_close(shared, apart, **CLOSE)


def test_answers_may_be_images_and_videos(checkpoint):
    policy = loaded(checkpoint("qwen2_5_vl"))
    image, other = (tiny.picture(seed=seed).load().pixels[0] for seed in (3, 4))
    video = tiny.clip(seed=5).load().pixels
    outcomes = [Outcome(image=image), Outcome(image=other), Outcome(video=video)]
    scores = scores_of(policy, outcomes, tiny.ask("b", "the fox"))[:, 0]
    assert len(set(scores.tolist())) == 3
    # An image is read where the prompt could have shown it: at the end of the question.
    shown = tiny.ask("c", "the fox", tiny.picture(seed=3))
    with torch.no_grad():
        asked = policy.encoder.encode(shown)
    assert torch.equal(policy.encode(tiny.ask("b", "the fox"), outcomes[0]).steps.prompt.ids, asked.ids)


CASES = pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_5_vl", {}),  # no class of classifiers
        ("gemma3", {"labels": ("helpful", "safe")}),
        ("qwen2_5_vl", {"lora_rank": 2, "labels": ("helpful", "safe")}),
    ],
)


@CASES
def test_a_saved_model_gives_the_same_scores(checkpoint, tmp_path, family, options):
    policy, other = moved(loaded(checkpoint(family), **options)), loaded(checkpoint(family), **options)
    policy.save(tmp_path / "model")
    assert not torch.equal(scores_of(policy), scores_of(other))
    other.load(tmp_path / "model")
    assert torch.equal(scores_of(policy), scores_of(other))
    folder = str(tmp_path / "model")
    if "lora_rank" in options:
        named = {"model": str(checkpoint(family)), "adapter": folder}
    else:
        named = {"model": folder}
        RewardModel.check_folders(named)
        again = loaded(folder)
        assert torch.equal(scores_of(policy), scores_of(again)) and again.labels == policy.labels
    for place, label in enumerate(policy.labels or ("",)):
        reward = Reward(**named, of=label, dtype="float32", device="cpu")
        found = reward([PROMPT] * 3, ANSWERS)
        assert found == pytest.approx(scores_of(policy)[:, place].tolist(), abs=1e-5)


def test_transformers_loads_the_folder_of_a_classifier(qwen2, tmp_path):
    policy = moved(loaded(qwen2, labels=("helpful", "safe")))
    policy.save(tmp_path)
    model = t.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert model.config.id2label == {0: "helpful", 1: "safe"}
    rows = [policy.encode(tiny.ask("a", "the fox"), one).steps.prompt.ids for one in ANSWERS[:2]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, True, model.config.pad_token_id)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=ids != model.config.pad_token_id).logits
    wanted = scores_of(policy, ANSWERS[:2], tiny.ask("a", "the fox"))
    torch.testing.assert_close(logits.double(), wanted, **CLOSE)


def test_a_merged_adapter_is_a_classifier(qwen2, tmp_path):
    policy = moved(loaded(qwen2, lora_rank=2))
    before = scores_of(policy, prompt=tiny.ask("a", "the fox"))
    policy.merge()
    policy.save(tmp_path)
    after = scores_of(loaded(tmp_path), prompt=tiny.ask("a", "the fox"))
    torch.testing.assert_close(before, after, **CLOSE)


def test_folders_that_do_not_fit_are_named(checkpoint, qwen2, tmp_path):
    policy = loaded(qwen2, labels=("helpful", "safe"))
    policy.save(tmp_path)
    with pytest.raises(ConfigError, match="has the labels helpful, safe, not good"):
        RewardModel.check_folders({"model": str(tmp_path), "labels": ["good"]})
    with pytest.raises(ConfigError, match="has the labels helpful, safe; set `of` to one of them, not ''"):
        Reward(model=str(tmp_path), device="cpu")
    with pytest.raises(ConfigError, match="is no reward model: it has no layer that computes a score"):
        Reward(model=str(qwen2), device="cpu")
    with pytest.raises(ConfigError, match="`labels` has 'a' twice"):
        loaded(qwen2, labels=("a", "a"))
    loaded(checkpoint("qwen2_5_vl"), lora_rank=2).save(tmp_path / "adapter")
    (tmp_path / "adapter" / "score.safetensors").unlink()
    named = {"model": str(checkpoint("qwen2_5_vl")), "adapter": str(tmp_path / "adapter")}
    with pytest.raises(ConfigError, match=r"has no `score.safetensors`, so it is none of a reward model"):
        RewardModel.check_folders(named)


# ---- training

ROWS = [
    {"prompt": f"the fox {i}", "chosen": f"brown {i}", "rejected": f"quick {i} {i}", "margin": 0.25 * (i % 3)}
    for i in range(6)
]
CHATS = [
    {name: [{"role": role, "content": row[name]}] for name, role in
     (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant"))} | {"margin": row["margin"]}
    for row in ROWS
]  # fmt: skip


def plan(model, folder: Path, **changes):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run = {
        "policy": {"name": "vision.reward_model", "model": str(model), "dtype": "float32"},
        "data": {"name": "vision.preference_pairs", "path": str(folder / "rows.jsonl")},
        "rewards": [
            {"name": "precomputed", "key": "preferred"},
            {"name": "pair_column", "column": "margin", "label": "margin", "weight": 0.0},
        ],
        "objective": {"margin": "margin", "center_rewards_coefficient": 0.01},
        "rollout": {"num_prompts": 6},
        "learn": {"learning_rate": 1e-2, "micro_batch_steps": 100},
        "report": {"trackers": [], "log_completions": False},
        "max_steps": 1,
        "output_dir": str(folder / "run"),
    }
    return merge(merge(read(method_file("reward_model")), run), changes)


def trained(model, folder: Path, **changes):
    run = build(parse(plan(model, folder, **changes), Config), quiet=True)
    train(run)
    return run


@pytest.fixture
def no_page(monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)


@pytest.mark.slow
def test_the_first_loss_is_that_of_trl(qwen2, tmp_path, no_page):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    start = tmp_path / "start"
    moved(loaded(qwen2)).save(start)
    run = trained(start, tmp_path)
    (record,) = run.journal.read()
    settings = trl.RewardConfig(
        output_dir=str(tmp_path / "trl"), center_rewards_coefficient=0.01, per_device_train_batch_size=6,
        report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1, max_steps=1,
        gradient_checkpointing=False, save_strategy="no", max_grad_norm=1.0,
    )  # fmt: skip
    tokenizer = t.AutoTokenizer.from_pretrained(start)
    trainer = trl.RewardTrainer(
        model=str(start), args=settings, train_dataset=Dataset.from_list(CHATS), processing_class=tokenizer
    )
    trainer.train()
    theirs = trainer.state.log_history[0]
    exact = {"abs": 2e-6}
    assert record["rewards/accuracies"] == pytest.approx(theirs["accuracy"], **exact)
    # The log of transformers has four digits of the loss; the gradient shows more.
    assert record["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    assert record["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert record["rewards/margins"] == pytest.approx(theirs["margin"], rel=1e-4)


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_bit_for_bit_as_the_whole_one(qwen2, tmp_path, no_page):
    ends = []
    for name, steps in (("whole", [4]), ("parts", [2, 4])):
        folder = tmp_path / name
        folder.mkdir()
        for max_steps in steps:
            changes = {"rollout": {"num_prompts": 2}, "save_steps": 2, "max_steps": max_steps}
            ends.append(trained(qwen2, folder, **changes).policy)
    whole, _, resumed = ends
    pairs = zip(whole.module.parameters(), resumed.module.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(qwen2, tmp_path, no_page):
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    changes = {"rollout": {"num_prompts": 4}, "max_steps": 2, "learn": {"learning_rate": 1e-3}}
    alone = trained(qwen2, tmp_path / "one", **changes).journal.read()
    launch([plan(qwen2, tmp_path / "two", **changes)], tmp_path)
    lines = (tmp_path / "two" / "run" / "metrics.jsonl").read_text().splitlines()
    for mine, theirs in zip(alone, map(json.loads, lines), strict=True):
        for name in ("loss", "rewards/margins", "rewards/accuracies", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_scores_are_recorded_for_an_evaluation(qwen2, tmp_path, no_page):
    data = {"name": "vision.preference_pairs", "path": str(tmp_path / "rows.jsonl")}
    evaluation = {
        "data": data,
        "num_generations": 2,
        "engine": ["offline", "vision.with_scores"],
        "rewards": [
            {"name": "precomputed", "key": "preferred", "label": "preferred"},
            {"name": "precomputed", "key": "score", "label": "score"},
        ],
        "metrics": [{"name": "pairwise_accuracy", "of": "score", "truth": "preferred"}],
    }
    run = trained(qwen2, tmp_path, evaluation=evaluation, max_steps=8)
    assert run.evaluator is not None
    measured = run.evaluator.measure()
    assert measured.metrics["accuracy/score"] == 1.0
    low, high = measured.intervals["accuracy/score"]
    assert 0 < low < high == 1.0
    row = measured.rollouts[0]
    again = replace(row.outcomes[-1], recorded={})
    assert row.outcomes[-1].recorded["score"] == pytest.approx(
        float(scores_of(run.policy, [again], row.prompt)), abs=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": {"labels": ["safe"]}}, "policy.labels: no reward is called 'safe'"),
        ({"objective": {"margin": "gap"}}, "objective.margin: no reward is called 'gap'"),
        (
            {"rewards": [{"name": "pair_column", "column": "gap", "label": "margin"}]},
            r"rewards\[0\].column: no row of data has 'gap'; the first have chosen",
        ),
    ],
)
def test_names_that_do_not_exist_are_errors_before_weights_load(qwen2, tmp_path, changes, message):
    config = parse(plan(qwen2, tmp_path, **changes), Config)
    with pytest.raises(ConfigError, match=message):
        check(config)
        check_inputs(config)
