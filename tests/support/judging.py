"""A judge that answers by a rule, in place of a server: for runs with judging rewards."""

from __future__ import annotations

import json

from mmrl.core.types import Outcome, Trajectory
from mmrl.engines.chat_completions import ChatCompletions


class Scripted(ChatCompletions):
    """Gives one criterion the score 1 and blames it, and proposes another one."""

    def __init__(self, policy, *, stream):
        self.asked = 0

    def rollout(self, prompts):
        self.asked += len(prompts)
        texts = [scripted(prompt.messages[-1].parts[-1].text) for prompt in prompts]
        return tuple(
            Trajectory(prompt, prompt.uid, (Outcome(text=text),), None, 0)
            for prompt, text in zip(prompts, texts, strict=True)
        )


def scripted(text: str) -> str:
    """Judge by the letters of the question."""
    letters = sum(map(ord, text))
    if "<edit>" in text:
        return f"<edit>{json.dumps({'add': f'Is like {letters}.'})}</edit>"
    count = next(n for n in range(9, 0, -1) if f"\n{n}. " in text)
    scores = [1 + (letters + i) % 10 for i in range(count)]
    worst = scores.index(min(scores)) + 1
    return f"<rubric>{json.dumps({'scores': scores, 'worst': worst, 'why': f'of {letters % 7}'})}</rubric>"
