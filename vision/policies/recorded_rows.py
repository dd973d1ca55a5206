"""Rows of recorded answers: single answers, and conversations with replies between their turns."""

from __future__ import annotations

from dataclasses import replace

from mmrl.core.types import Message, Outcome, Part, Prompt, Trajectory, Transcript
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.models.recorded_turns import encode_recorded


def recorded_row(encoder: PromptEncoder, prompt: Prompt, outcome: Outcome) -> Trajectory:
    """Encode a recorded answer as a row whose steps are the tokens of all its turns of the assistant.

    Every turn ends with its end token. The messages between the turns are read, and are no steps. The row's
    answer is the last turn; it keeps the `turns`, and leaves out `asked`, so that an engine can encode it
    again after other media. Raises ValueError for an answer that the model cannot read.
    """
    text, turns, replies = encode_recorded(encoder, prompt, outcome)
    row, tags = TokenRow.of_turns(turns), {"finish": "stop", **outcome.tags}
    answer = Outcome(text, end=len(row.ids), tags=tags, recorded=outcome.recorded, turns=outcome.turns)
    whole = Trajectory(prompt, prompt.uid, (answer,), row, len(row.ids), {"token": row.ids}, on_policy=False)
    if not replies:
        return whole
    script = Transcript(prompt.tools, tuple(ids for _, ids in turns), tuple(map(tuple, replies)))
    return replace(
        whole,
        turns=(*outcome.turns, Message("assistant", (Part(text),))),
        transcript=None if outcome.asked else script,
    )
