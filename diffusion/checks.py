"""Check at the start: the text of a prompt reaches the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import check
from mmrl.diagnostics.context import Examined, Finding


@check(on="start")
def text_conditioning(examined: Examined, *, rows: PositiveInt = 4) -> Iterator[Finding]:
    """Check that the likelihood of steps changes with the text of the prompt.

    `rows` rollouts are compared.
    """
    texts = list(dict.fromkeys(prompt.text for prompt in examined.prompts))
    if len(texts) < 2:
        return
    shown = examined.rollouts[:rows]
    following = dict(zip(texts, [*texts[1:], texts[0]], strict=True))  # each text gets the next one
    condition = examined.policy.condition
    other = [
        replace(row, steps=replace(row.steps, condition=condition(following[row.prompt.text])))
        for row in shown
    ]
    own, foreign = examined.log_probabilities(shown), examined.log_probabilities(tuple(other))
    if bool((own == foreign).all()):  # bit for bit: texts that are ignored change nothing at all
        yield Finding(
            "the text of a prompt does not reach the network: steps are exactly as likely under another one",
            "see that the text encoders are the pipeline's own, and that their output is passed on",
        )
