"""Command `mmrl chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.cli.command import OVERRIDES, argument, command, for_terminal
from mmrl.cli.generate import ENGINE, IMAGES, MODEL, check_medium, engine_options, printed, spoken
from mmrl.config.loading import ConfigError

if TYPE_CHECKING:
    from mmrl.core.types import Trajectory
    from mmrl.inference.session import Session

HELP = "/image PATH, /video PATH: show it with the next question; /reset: forget everything; /exit"


class Conversation:
    """State of a conversation with a model: all turns so far, and media for the next question."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.reset()

    def reset(self) -> None:
        """Start anew: delete all turns of the conversation, and the media for the next question."""
        self.turns: list[dict[str, Any]] = []
        self.shown: list[dict[str, str]] = []

    def show(self, kind: str, path: str) -> None:
        """Add an image or video file to the next question; raise `ConfigError` if it cannot be opened."""
        check_medium(kind, Path(path).expanduser())
        self.shown.append({"type": kind, "path": path})

    def ask(self, text: str) -> Trajectory:
        """Generate the answer to a question; the model reads all earlier turns, with tool replies.

        After an answer that is not text, the conversation starts anew.
        """
        from mmrl.inference.session import as_conversation

        question = {"role": "user", "content": [*self.shown, {"type": "text", "text": text}]}
        (row,) = self.session.ask([[*self.turns, question]])
        if row.outcomes[-1].text is None:
            self.reset()
        else:
            self.turns += [question, *as_conversation(row).messages]
            self.shown = []
        return row


@command(
    MODEL,
    OVERRIDES,
    argument("--output", type=Path, default=IMAGES, help="folder for images (default: images)"),
    *ENGINE,
    examples=("mmrl chat runs/my_run", "mmrl chat Qwen/Qwen2.5-VL-3B-Instruct --temperature 0"),
)
def chat(given: argparse.Namespace) -> None:
    """Talk with a model in the terminal, also about images and videos; /exit ends the conversation.

    The end of the input also ends it. The model reads all earlier turns. Generated images are written into
    the folder --output. Answers go to the standard output, everything else to the standard error.
    """
    from mmrl.build import load_engine

    talk = Conversation(load_engine(given.model, given.overrides, **engine_options(given)))
    print(HELP, file=sys.stderr)
    for line in lines():
        try:
            reply = respond(talk, line)
        except ValueError as error:  # a wrong path or question does not end the conversation
            print(f"error: {error}", file=sys.stderr)
            continue
        if reply is not None:
            folder, turns = given.output, reply.turns
            shown = spoken(turns, folder) if len(turns) > 1 else printed(reply.outcomes[-1], folder)
            print(for_terminal(shown), flush=True)


def respond(talk: Conversation, line: str) -> Trajectory | None:
    """Answer a question, or run a chat command (`/...`) and return None; ConfigError for unknown commands."""
    name, _, rest = line.partition(" ")
    match name, rest.strip():
        case "/reset", "":
            talk.reset()
        case (("/image" | "/video"), path) if path:
            talk.show(name[1:], path)
        case _ if line.startswith("/"):
            raise ConfigError(f"there is no command '{line}'; there are {HELP}")
        case _:
            return talk.ask(line)
    return None


def lines() -> Iterator[str]:
    """Yield input lines up to /exit or the end; on a terminal, show a prompt and allow editing."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives `input` line editing and a history
    while True:
        try:
            line = (input("> ") if sys.stdin.isatty() else input()).strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line:
            yield line
