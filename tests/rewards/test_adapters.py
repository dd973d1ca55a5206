"""The forms a reward may be written in: one outcome at a time, or TRL's, plain and asynchronous."""

from __future__ import annotations

import asyncio

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.registry import find, is_trl
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt, TrainerState, Trajectory
from mmrl.rewards.adapters import from_trl, per_outcome
from mmrl.runtime.distributed import Processes
from mmrl.training.score import RewardFault, RewardLog, score
from tests.rewards import trl_style


def asked(uid, text, **columns):
    return Prompt(uid, (Message("user", (Part(text),)),), target=f"target of {uid}", columns=columns)


PROMPTS = [asked("a", "first", wanted=12), asked("b", "second")]
OUTCOMES = [Outcome(text="12"), Outcome(text="345")]


def named(function, **options):
    """Bind a reward by its name, as a config does."""
    piece = Piece(f"tests.rewards.trl_style:{function}", options)
    return Pieces(Stream()).make("reward", piece, place="rewards[0]")


def rollouts():
    pairs = zip(PROMPTS, OUTCOMES, strict=True)
    return tuple(Trajectory(prompt, prompt.uid, (outcome,), None, 1) for prompt, outcome in pairs)


def test_per_outcome_measures_one_at_a_time_and_keeps_name_and_options():
    @per_outcome
    def size(prompt, outcome, *, factor: float = 1.0):
        """Measure."""
        return factor * len(outcome.text) if prompt.uid == "a" else None

    assert size(PROMPTS, OUTCOMES, factor=10.0) == [20.0, None]
    assert (size.__name__, size.__doc__) == ("size", "Measure.")


def test_per_outcome_refuses_prompts_and_outcomes_of_different_number():
    with pytest.raises(ValueError):
        per_outcome(lambda prompt, outcome: 0.0)(PROMPTS, OUTCOMES[:1])


def test_a_function_that_takes_completions_is_in_trls_form():
    assert is_trl(trl_style.count_letters)
    assert is_trl(trl_style.patient_letters)
    assert not is_trl(per_outcome(lambda prompt, outcome: 0.0))


def test_a_trl_function_is_a_reward_as_it_stands():
    assert named("count_letters")(PROMPTS, OUTCOMES) == [2.0, 3.0]
    assert named("count_letters").name == "count_letters"
    assert named("count_letters", weight=2.0, label="letters").name == "letters"


def test_columns_are_handed_over_by_name_and_none_where_a_row_has_none():
    assert named("equals_column")(PROMPTS, OUTCOMES) == [1.0, 0.0]


def test_everything_is_handed_to_a_function_that_takes_everything():
    named("remember")(PROMPTS, OUTCOMES)
    given = trl_style.remember.given
    assert given["prompts"] == ["first", "second"]
    assert given["completions"] == ["12", "345"]
    assert given["wanted"] == [12, None]
    assert given["target"] == ["target of a", "target of b"]
    assert given["completion_ids"] == [None, None]
    assert given["trainer_state"].global_step == 0


def test_prompts_that_are_messages_give_messages_and_so_do_their_completions():
    messages = [{"role": "user", "content": "first"}]
    named("remember")([asked("a", "first", prompt=messages)], OUTCOMES[:1])
    given = trl_style.remember.given
    assert given["prompts"] == [messages]
    assert given["completions"] == [[{"role": "assistant", "content": "12"}]]


def test_completions_of_image_and_video_models_are_their_media():
    image, video = torch.zeros(3, 2, 2), torch.zeros(4, 3, 2, 2)
    named("remember")(PROMPTS, [Outcome(image=image), Outcome(video=video)])
    assert trl_style.remember.given["completions"][0] is image
    assert trl_style.remember.given["completions"][1] is video


def test_an_asynchronous_function_stays_asynchronous():
    bound = named("patient_letters")
    assert asyncio.run(bound(PROMPTS, OUTCOMES)) == [2.0, None]


def test_plain_and_asynchronous_functions_are_scored_side_by_side():
    table = score([named("count_letters"), named("patient_letters", weight=0.5)], rollouts())
    assert table.names == ("count_letters", "patient_letters")
    assert table.values[:, :, 0].tolist() == [[2, 2], [3, 0]]
    assert table.valid[:, :, 0].tolist() == [[True, True], [True, False]]


def test_a_column_that_no_row_has_is_a_fault_that_names_the_reward():
    with pytest.raises(RewardFault, match="reward 'asks_for_more' raised TypeError.*'gold'"):
        score([named("asks_for_more")], rollouts())


def test_arguments_of_trl_functions_are_not_options():
    assert not find("reward", "tests.rewards.trl_style:equals_column").options
    with pytest.raises(ValueError, match="has no option 'wanted'; it takes none"):
        named("equals_column", wanted=3)


def test_the_wrapped_function_keeps_its_name():
    assert from_trl(trl_style.count_letters).__name__ == "count_letters"


def test_a_function_of_ours_is_found_in_any_module():
    piece = Piece("tests.support.toys:brevity", {})
    assert Pieces(Stream()).make("reward", piece)(PROMPTS, OUTCOMES) == [-0.1, -0.1]


@pytest.mark.parametrize("name", ["tests.rewards.trl_style:missing", "tests.no_such_module:function"])
def test_a_function_that_cannot_be_imported_is_named(name):
    with pytest.raises(ValueError, match=f"cannot import the reward '{name}'"):
        find("reward", name)


# ---- what TRL hands over besides: tokens, progress, logging


def sampled(*texts, tokens=(3, 2)):
    """Rollouts of one outcome each, with the engine's note of their tokens."""
    noted = [{"token": torch.arange(10, 10 + n)} for n in tokens]
    both = zip(PROMPTS, texts, noted, tokens, strict=True)
    return tuple(
        Trajectory(p, p.uid, (Outcome(text=text, end=n),), None, n, notes) for p, text, notes, n in both
    )


def test_tokens_and_progress_are_handed_over():
    log = RewardLog(TrainerState(global_step=4, max_steps=10))
    table = score([named("keeps_notes")], sampled("AB", "c"), log=log)
    assert table.values[:, 0, 0].tolist() == [1.5, 1.0]  # 3 and 2 tokens, times (4 + 1) / 10


def test_tokens_end_with_their_outcome():
    prompt, ids = PROMPTS[0], torch.tensor([5, 6, 7])
    row = Trajectory(
        prompt, "a", (Outcome(text="1", end=1), Outcome(text="2", end=3)), None, 3, {"token": ids}
    )
    score([named("remember")], (row,))
    assert trl_style.remember.given["completion_ids"] == [[5], [5, 6, 7]]


def test_logged_metrics_are_means_and_logged_columns_belong_to_rollouts():
    log, rows = RewardLog(TrainerState(0, 1)), sampled("AB", "c")
    for texts in (("AB", "c"), ("AB", "C")):
        rows = sampled(*texts)
        score([named("keeps_notes")], rows, log=log)
    assert [row.logged for row in log.onto(rows)] == [{"first": "A"}, {"first": "C"}]
    processes = Processes()
    assert log.take(processes) == {"shouting": 0.75}  # the mean of 0.5 and 1
    assert log.take(processes) == {}
    assert log.onto(rows) is rows


def test_what_a_failed_try_logged_is_dropped():
    log = RewardLog()
    score([named("fails_once", retries=1)], sampled("AB", "c"), log=log)
    assert log.metrics == {"tries": [1.0]}


def test_what_cannot_be_logged_is_a_fault():
    with pytest.raises(RewardFault, match=r"log_extra\('short', ...\): wanted 2 values, .* got 1"):
        score([named("logs_nonsense")], sampled("AB", "c"))
    with pytest.raises(RewardFault, match=r"log_metric\('bad', 'much'\): a finite number is wanted"):
        score([named("logs_nonsense")], sampled("AB", "c")[:1])


# ---- rewards of others


def chats(*pairs, **columns):
    """Rollouts of conversational prompts with columns, from texts and rows."""
    rows = []
    for i, (text, row) in enumerate(pairs):
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
        prompt = asked(f"p{i}", "How many?", prompt=messages, **row, **columns)
        rows.append(Trajectory(prompt, prompt.uid, (Outcome(text=text),), None, 1))
    return tuple(rows)


NUMBER, LETTER, OPEN = ({"problem_type": kind, "solution": "3"} for kind in ("number", "letter", "open"))


def test_reward_files_of_vision_language_models_run_as_they_stand():
    right, wrong = "<think>so</think> <answer>3.4</answer>", "3"
    rows = chats((right, NUMBER), (right, LETTER), (wrong, OPEN), current_step=50)
    table = score([named("format_reward"), named("typed_accuracy"), named("judged")], rows)
    assert table.scored["format_reward"][:, 0].tolist() == [1, 1, 0]
    assert table.scored["judged"][:, 0].tolist() == [1, 1, 1]
    assert table.scored["typed_accuracy"][:2, 0].tolist() == [1, 0]
    assert table.scored["typed_accuracy"].isnan()[2, 0]
    late = score([named("typed_accuracy")], chats((right, NUMBER), current_step=100))
    assert late.values[0, 0, 0] == 0


def test_rewards_of_trl_run_unchanged():
    pytest.importorskip("trl")
    thought = "<think>\n2 + 1\n</think>\nThe answer is \\boxed{3}."
    table = score([of_trl("think_format_reward")], chats((thought, {}), ("It is \\boxed{4}.", {})))
    assert table.values[:, 0, 0].tolist() == [1, 0]
    pytest.importorskip("math_verify")
    solution, log = {"solution": "$3$"}, RewardLog()
    rows = chats((thought, solution), ("It is \\boxed{4}.", solution))
    assert score([of_trl("accuracy_reward")], rows, log=log).values[:, 0, 0].tolist() == [1, 0]
    assert [row.logged["solution"] for row in log.onto(rows)] == ["$3$", "$3$"]


def of_trl(name):
    return Pieces(Stream()).make("reward", Piece(f"trl.rewards:{name}"), place="rewards[0]")
