"""Check before training that the text of a prompt reaches the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import check
from mmrl.diagnostics.context import Examined, Finding
from mmrl.diffusion.model_family import Request, size_of


@check(on="start")
def text_conditioning(examined: Examined, *, rows: PositiveInt = 4) -> Iterator[Finding]:
    """Check that the log-likelihood of denoising steps depends on the prompt's text.

    Compares `rows` rollouts under their own text and under another text.
    """
    texts = list(dict.fromkeys(prompt.text for prompt in examined.prompts))
    if len(texts) < 2:
        return
    shown = examined.rollouts[:rows]
    following = dict(zip(texts, [*texts[1:], texts[0]], strict=True))  # maps each text to the next text
    other = []
    for row in shown:
        request = replace(Request.of(row.prompt, size_of(row.outcomes[-1])), text=following[row.prompt.text])
        steps = replace(row.steps, condition=examined.policy.condition(request))
        other.append(replace(row, steps=steps))
    own, foreign = examined.log_probabilities(shown), examined.log_probabilities(tuple(other))
    if bool((own == foreign).all()):  # exactly equal only if the text is ignored
        yield Finding(
            "the text of a prompt does not reach the network: steps are exactly as likely under another one",
            "see that the text encoders are the pipeline's own, and that their output is passed on",
        )
