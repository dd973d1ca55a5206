"""Functions that list the policy's tool calls in a turn, and `tool_calls`, which counts them."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config.registry import reward as register
from mmrl.core.tool_calls import Call, CallError, parse_calls
from mmrl.core.types import Message, Outcome, Prompt
from mmrl.rewards.adapters import policy_messages

CALL = "tool_call"  # tag of a block with a call in JSON
ANSWERED = (
    "call",
    "stop",
)  # values of `outcome.tags["finish"]` that mean: all calls of the last turn were executed


def written_calls(turn: Message, tag: str) -> Sequence[Call | CallError]:
    """List the calls of a turn: the calls that the engine parsed, or else the calls in blocks of `tag`."""
    return parse_calls(turn.text, tag) if turn.calls is None or tag != CALL else turn.calls


def calls_in(turn: Message, tag: str = CALL) -> list[Call]:
    """List the well-formed calls of a turn."""
    return [call for call in written_calls(turn, tag) if isinstance(call, Call)]


@register
def tool_calls(
    prompts: Sequence[Prompt], outcomes: Sequence[Outcome], *, tag: str = CALL, name: str = ""
) -> list[float]:
    """Count the tool calls of an answer, or of all turns of a conversation, for use as a label.

    Counts the calls that the engine of a conversation parsed, or else the blocks `<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>`; malformed ones do not count. Set `weight: 0`: the count is a label, read
    by other pieces, and is not added to the reward. With `at: every` each turn counts its own calls.

    Args:
        tag: Tag of a call.
        name: Count only calls of this tool; empty: all.
    """
    return [
        float(sum(not name or call.name == name for turn in new for call in calls_in(turn, tag)))
        for _, new in policy_messages(outcomes)
    ]
