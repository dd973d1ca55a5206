"""Labelled answers of TRL, LLaMA-Factory and ms-swift, and TRL's loss of KTO on a model."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.data.dataset_io import RowError
from mmrl.engines.dataset_answers import Offline, WithMismatched
from mmrl.vision.datasets.unpaired_preferences import unpaired_preferences
from tests.objectives.test_comparison import told
from tests.support.tables import step_table
from tests.vision import tiny
from tests.vision.test_preference_rows import ASKED, CALL, REPLY, SAID, TOOL, WRAPPED, home, shown
from tests.vision.test_preference_rows import read as read_rows

__all__ = ["home"]
QUIET = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda value: value)
SEES = {"role": "user", "content": "<video>what"}
FORMS = {
    "trl": {"prompt": "what", "completion": "a dog", "label": True, "videos": ["a.mp4"]},
    "trl messages": {"prompt": [SEES], "completion": [SAID], "label": True, "videos": ["a.mp4"]},
    "llama-factory": {
        "conversations": [{"from": "human", "value": "<video>what"}, {"from": "gpt", "value": "a dog"}],
        "kto_tag": True, "videos": ["a.mp4"],
    },
    "llama-factory messages": {"messages": [SEES, SAID], "kto_tag": True, "videos": ["a.mp4"]},
    "alpaca": {"instruction": "<video>what", "output": "a dog", "kto_tag": True, "videos": ["a.mp4"]},
    "ms-swift": {"messages": [SEES, SAID], "label": True, "videos": ["a.mp4"]},
    "ms-swift query": {"query": "<video>what", "response": "a dog", "label": 1, "videos": ["a.mp4"]},
}  # fmt: skip


def read(home, *rows, **options):
    return read_rows(home, *rows, dataset=unpaired_preferences, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", [True, False])
def test_a_labelled_answer_is_the_same_in_every_form(home, form, label):
    tag = "kto_tag" if "kto_tag" in FORMS[form] else "label"
    (prompt,) = read(home, {**FORMS[form], tag: label, "source": "me"}, frames_per_second=1.0)
    assert shown(prompt.messages) == [("user", ["a.mp4", "what"])]
    (answer,) = prompt.answers
    assert (answer.text, answer.recorded) == ("a dog", {"label": 1.0 if label else -1.0})
    assert prompt.columns == {"source": "me", tag: label}
    assert prompt.media[0].load.sampling.frames_per_second == 1.0


def test_the_answer_is_every_turn_after_the_last_question(home):
    made = {"name": "crop", "arguments": {"box": [0, 1]}}
    swift = [{"role": "tool_call", "content": json.dumps(made)}, {"role": "tool_response", "content": "done"}]
    before = [ASKED, SAID, ASKED]
    for row in (
        {"prompt": before, "completion": [CALL, REPLY, SAID]},
        {"messages": [*before, CALL, REPLY, SAID]},
        {"messages": [*before, *swift, SAID]},
    ):
        (prompt,) = read(home, {**row, "label": False, "tools": json.dumps([TOOL])})
        assert [message.role for message in prompt.messages] == ["user", "assistant", "user"]
        (answer,) = prompt.answers
        assert [turn.role for turn in answer.turns] == ["assistant", "tool"] and answer.text == "a dog"
        assert answer.turns[0].keys["tool_calls"][0]["function"] == made and prompt.tools == (WRAPPED,)


def test_a_label_may_be_a_cell_of_csv_or_a_float_of_parquet(home):
    for value, label in (("True", 1.0), ("false", -1.0), ("1", 1.0), (0.0, -1.0), (1.0, 1.0)):
        (prompt,) = read(home, {**FORMS["trl"], "label": value})
        assert prompt.answers[0].recorded == {"label": label}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**FORMS["trl"], "label": None}, "wanted true or false as `label`, got none"),
        ({**FORMS["trl"], "label": "yes"}, "as `label`, got 'yes'"),
        ({**FORMS["trl"], "label": 0.5}, "as `label`, got 0.5"),
        ({**FORMS["trl"], "label": 2}, "as `label`, got 2"),
        ({**FORMS["alpaca"], "kto_tag": "good"}, "as `kto_tag`, got 'good'"),
        ({**FORMS["trl"], "kto_tag": False}, "another `kto_tag`"),
        ({**FORMS["trl"], "completion": ""}, "wanted an answer"),
        ({"messages": [ASKED], "label": True}, "wanted an answer"),
        ({"messages": [SAID], "label": True}, "turn of the user"),
        ({**FORMS["trl"], "videos": ["no.mp4"]}, "no file 'no.mp4'"),
        ({**FORMS["ms-swift"], "videos": []}, "1 video places, but 0 are given"),
        ({**FORMS["trl"], "rejected": "a cat"}, "`vision.preference_pairs` reads pairs"),
        ({**FORMS["ms-swift"], "rejected_response": "a cat"}, "rejected_response"),
        ({**FORMS["trl"], "instruction": "x"}, "asks in `prompt` beside instruction"),
    ],
)
def test_wrong_rows_are_one_line_each(home, row, message):
    with pytest.raises(RowError, match=message):
        read(home, row)
    assert [one.uid for one in read(home, row, {**FORMS["trl"], "id": "good"}, bad_rows="drop")] == ["good"]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.7)])
def test_kto_with_its_level_is_trls_on_a_model(exact, weights):
    """Loss and KL term of TRL's trainer, whose answers rotate the other way: it reads the rows backwards."""
    trainer_of = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    policy, beta, labels = exact("qwen2_5_vl"), 0.5, [1, -1, 1]
    texts, other = ["a red dog", "no", "under the box"], copy.deepcopy(policy.model)
    with torch.no_grad():
        for weight in other.parameters():  # the reference
            weight.add_(
                0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight)
            )
    asked = [
        replace(tiny.ask(f"p{i}", f"what {i}"), answers=(Outcome(text=text),)) for i, text in enumerate(texts)
    ]
    rows = WithMismatched(Offline(policy, stream=Stream(0))).rollout([one for one in asked for _ in range(2)])
    batch = policy.collate(rows)
    with torch.no_grad():
        new, ref = policy(batch).logp, policy.reading_with(other, "float64")(batch.steps, frozenset())["logp"]
    own = [[values[i, : row.length].tolist() for i, row in enumerate(rows)] for values in (new, ref)]
    unrelated = [[0.0] * row.length if i < 3 else [1.0] * row.length for i, row in enumerate(rows)]
    table = step_table(
        own[0], advantage=[*labels, 0, 0, 0], group=[0, 1, 2] * 2, ref=own[1], notes={"unrelated": unrelated}
    )
    kto = {"name": "kto", "beta": beta, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    level = float(told(*table, implicit_reward="log_ratio", compare=[kto])[1]["rewards/unrelated"])
    loss, _ = told(*table, implicit_reward="log_ratio", compare=[{**kto, "delta": level}])

    def inputs(part, prefix=""):
        """Lay rows out as TRL's collator does."""
        ids = [torch.cat([row.steps.prompt.ids, row.steps.ids]) for row in part]
        size = max(map(len, ids))
        whole = torch.stack([torch.nn.functional.pad(one, (0, size - len(one))) for one in ids])
        place = torch.arange(size)
        answer = torch.stack(
            [
                (place >= len(one) - row.length) & (place < len(one))
                for one, row in zip(ids, part, strict=True)
            ]
        )
        attended = torch.stack([place < len(one) for one in ids])
        names = ("input_ids", "attention_mask", "completion_mask")
        values = (whole, attended.long(), answer.long())
        return {prefix + name: value for name, value in zip(names, values, strict=True)}

    def reads(model):
        def call(input_ids, attention_mask, labels, **options):
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
            logits[..., policy.prompt_encoder.placeholders] = -1e30  # no step may be one of these
            target = labels[:, 1:]
            logp = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
            logp = torch.where(target >= 0, logp, 0.0)
            return SimpleNamespace(log_probs=logp, entropy=torch.zeros_like(logp), mean_logits=logp)

        call.training = True
        return call

    trainer = SimpleNamespace(
        model=reads(policy.model), ref_model=reads(other), accelerator=QUIET, aux_loss_enabled=False,
        precompute_ref_logps=False, calculate_KL=True, beta=beta, loss_type="kto", _total_train_tokens=0,
        desirable_weight=weights[0], undesirable_weight=weights[1], _metrics={"train": defaultdict(list)},
        _tp_size=1, args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    trainer._compute_kl_logps = lambda model, batch: trainer_of._compute_kl_logps(trainer, model, batch)
    given = {**inputs(rows[2::-1]), **inputs(rows[:2:-1], "KL_"), "label": torch.tensor(labels[::-1]) > 0}
    import trl.trainer.kto_trainer as module

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "disable_gradient_checkpointing", lambda *_: torch.no_grad())
        patch.setattr(module, "is_peft_model", lambda model: False)
        wanted = float(trainer_of._compute_loss(trainer, trainer.model, given, False))
    (kl,) = trainer._metrics["train"]["kl"]
    assert level > 0.01  # the term matters; a negative one counts as 0 on both sides
    assert level == pytest.approx(beta * kl, rel=1e-6)
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
