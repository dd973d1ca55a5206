"""Rewards as they are written for TRL, which tests name as `tests.rewards.trl_style:function`."""

from __future__ import annotations

import asyncio


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
