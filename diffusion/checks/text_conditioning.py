"""Whether texts reach the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import check
from mmrl.diagnostics.context import Examined, Finding


@check(on="start")
def text_conditioning(examined: Examined, *, rows: PositiveInt = 4) -> Iterator[Finding]:
    """Tell the network another prompt's text: the steps of a picture have to become more or less likely."""
    texts = list(dict.fromkeys(prompt.text for prompt in examined.prompts))
    if len(texts) < 2:
        return
    shown = examined.rollouts[:rows]
    following = dict(zip(texts, [*texts[1:], texts[0]], strict=True))
    condition = examined.policy.condition
    other = [
        replace(row, steps=replace(row.steps, condition=condition(following[row.prompt.text])))
        for row in shown
    ]
    told, confused = examined.ask(shown), examined.ask(tuple(other))
    if bool((told == confused).all()):
        yield Finding(
            "the text of a prompt does not reach the network: steps are exactly as likely under another one",
            "see that the text encoders are the pipeline's own, and that what they say is passed on",
        )
