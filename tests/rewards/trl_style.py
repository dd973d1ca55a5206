"""Rewards as they are written for TRL, which tests name as `tests.rewards.trl_style:function`."""

from __future__ import annotations

import asyncio
import re


def count_letters(completions, **kwargs):
    return [float(len(text)) for text in completions]


def equals_column(prompts, completions, wanted):
    return [float(text == str(word)) for text, word in zip(completions, wanted, strict=True)]


def remember(completions, **kwargs):
    remember.given = {"completions": completions, **kwargs}
    return [None] * len(completions)


async def patient_letters(completions, wanted=None, **kwargs):
    await asyncio.sleep(0)
    return [
        None if word is None else float(len(text)) for text, word in zip(completions, wanted, strict=True)
    ]


def asks_for_more(completions, gold):
    return [0.0] * len(completions)


def keeps_notes(completions, completion_ids, trainer_state, log_metric, log_extra, **kwargs):
    """Log a metric and a column, and reward the number of tokens times progress."""
    log_metric("shouting", sum(text.isupper() for text in completions) / len(completions))
    log_extra("first", [text[:1] for text in completions])
    assert "prompt" not in kwargs and "environments" not in kwargs
    return [len(ids) * (trainer_state.global_step + 1) / trainer_state.max_steps for ids in completion_ids]


def fails_once(completions, log_metric, **kwargs):
    log_metric("tries", 1.0)
    fails_once.calls = getattr(fails_once, "calls", 0) + 1
    if fails_once.calls == 1:
        raise OSError("busy")
    return [0.0] * len(completions)


def logs_nonsense(completions, log_metric, log_extra, **kwargs):
    log_extra("short", completions[:1]) if len(completions) > 1 else log_metric("bad", "much")
    return [0.0] * len(completions)


# ---- in the form of published reward files of vision-language models


def format_reward(completions, **kwargs):
    """Reward the form <think>...</think> <answer>...</answer>, of messages."""
    pattern = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
    return [float(bool(pattern.fullmatch(turns[0]["content"].strip()))) for turns in completions]


def typed_accuracy(prompts, completions, solution, problem_type, current_step, **kwargs):
    """Compare numbers with a tolerance that becomes strict, letters exactly; columns come by name."""
    rewards = []
    for turns, wanted, kind, step in zip(completions, solution, problem_type, current_step, strict=True):
        found = re.search(r"<answer>(.*?)</answer>", turns[-1]["content"])
        given = found.group(1).strip() if found else ""
        if kind == "number":
            tolerance = 0.5 if step < 100 else 0.05
            close = given.replace(".", "").isdigit() and abs(float(given) - float(wanted)) <= tolerance
            rewards.append(float(close))
        else:
            rewards.append(None if kind == "open" else float(given == wanted))
    return rewards


def logs_length(completions, trainer_state, log_metric, log_extra, **kwargs):
    """Log what a run writes: a metric of progress, and numbers and texts of every completion."""
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    log_extra("words", [len(text.split()) for text in completions])
    log_extra("last", [text[-1:] or None for text in completions])
    return [float(len(text)) for text in completions]


def logs_a_metric_of_the_run(completions, log_metric, **kwargs):
    log_metric("reward", 1.0)
    return [float(len(text)) for text in completions]


async def judged(prompts, completions, solution, **kwargs):
    """Ask for every completion at the same time, as of a judge."""

    async def ask(turns, wanted):
        await asyncio.sleep(0)
        return float(wanted in turns[0]["content"])

    return await asyncio.gather(*(ask(*both) for both in zip(completions, solution, strict=True)))
