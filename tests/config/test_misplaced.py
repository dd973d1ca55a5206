"""A key at a wrong place, or by the name of another trainer, is answered with where it belongs."""

from __future__ import annotations

import re

import pytest

from mmrl.build import check
from mmrl.config import misplaced
from mmrl.config.loading import ConfigError, read
from mmrl.config.schema import Config, load, parse
from mmrl.trl.names import NAMES, NEUTRAL, REFUSED

FILE = "train/charades_sta_tempsamp.yaml"


def hint(override: str, file: str = FILE) -> str:
    with pytest.raises(ConfigError) as raised:
        check(load(file, [override], Config))
    return str(raised.value)


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("num_generations=4", "rollout.num_generations"),
        ("learning_rate=1e-5", "learn.learning_rate"),
        ("max_completion_length=64", "rollout.engine.0.max_completion_length"),
        ("policy.learning_rate=1e-5", "learn.learning_rate"),
        ("rollout.engine.0.lora_rank=8", "policy.lora_rank"),
        ("objective.epsilon=0.3", "objective.surrogate.epsilon"),  # an option beside its piece
        ("weight_decay=0.1", "learn.optimizer.weight_decay"),  # of a piece that stands there by default
        ("report.max_steps=3", "max_steps"),
        ("evaluation.temperature=0.5", "evaluation.engine.0.temperature"),  # of its own section first
        ("temperatur=0.5", "rollout.engine.0.temperature"),  # misspelt as well
        ("rewards.0.wieght=2", "rewards.0.weight"),  # a setting of the caller of a piece
    ],
)
def test_a_misplaced_key_is_answered_with_its_place(override, place):
    assert f"; did you mean `{place}`?" in hint(override)


def test_a_suggested_key_can_be_set():
    assert load(FILE, ["learn.optimizer.weight_decay=0.1"]).learn.optimizer.options == {"weight_decay": 0.1}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "per_device_train_batch_size",
            "that is an argument of TRL; here it is rollout.num_prompts; as it is",
        ),
        ("beta", "here it is objective.penalty; as it is, it goes into a mapping: `trl: {beta: ...}`"),
        ("report_to", "here it is report.trackers"),
        ("resume_from_checkpoint", "not here. The same command goes on"),
        ("lr", "here that is learn.learning_rate"),
        ("lora_r", "here it is policy.lora_rank"),
    ],
)
def test_arguments_of_trl_and_other_words_are_translated(argument, words):
    assert words in hint(f"{argument}=1")


def test_every_word_names_a_key_that_exists():
    places = {*misplaced._places(read(FILE), Config)}
    for word, words in misplaced.WORDS.items():
        assert re.match(r"[\w.]+", words)[0] in places, word
        assert word not in {*NAMES, *REFUSED, *NEUTRAL}, f"{word} is an argument of TRL already"


def test_an_option_that_fits_nowhere_names_what_there_is():
    assert hint("sampler.zzz=1").endswith("it takes shuffle; `mmrl list sampler uniform`")
    assert "; there are policy, data, rollout" in hint("zzz=1")


def test_a_variant_is_searched_as_well():
    with pytest.raises(ConfigError, match="did you mean `rollout.num_generations`"):
        parse({"advantage": ["total"], "num_generations": 2}, Config, part=True)
