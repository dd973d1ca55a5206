"""Command `mmrl compare-answers`: asks two models or settings the same question on a local web page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mmrl.cli.command import argument, command
from mmrl.cli.generate import ENGINE, engine_options
from mmrl.config.loading import ConfigError

if TYPE_CHECKING:
    from mmrl.core.types import Outcome
    from mmrl.inference.session import Session


@command(
    argument("first", metavar="A", help="a YAML file, the folder of a run or a checkpoint, or a model"),
    argument("second", metavar="B", help="the same; it may be A with other settings"),
    argument("overrides", nargs="*", metavar="key=value", help="changes of both"),
    argument("--setting-a", default="", help="name of one of the `settings` of A"),
    argument("--setting-b", default="", help="name of one of the `settings` of B"),
    argument("--port", type=int, default=7860, help="of the page, on this machine only (default: 7860)"),
    *ENGINE,
    examples=(
        "mmrl compare-answers runs/my_run/checkpoint-100 runs/my_run/checkpoint-200",
        "mmrl compare-answers evaluate/pareto.yaml evaluate/pareto.yaml --setting-a full --setting-b '1 bit'",
    ),
)
def compare_answers(given: argparse.Namespace) -> None:
    """Open a local page that asks two checkpoints or settings the same question side by side.

    Both models use the same random numbers. The page can be opened only on this machine.
    """
    gradio = load_gradio()
    from mmrl.build import check_source, open_source
    from mmrl.inference.sources import resolve

    both = ((given.first, given.setting_a), (given.second, given.setting_b))
    options = engine_options(given)
    sources = [resolve(name, given.overrides, setting=setting, options=options) for name, setting in both]
    for source in sources:
        check_source(source)
    sessions = [open_source(source) for source in sources]
    blocks = page(gradio, ask_both(sessions), [f"{name} {setting}".strip() for name, setting in both])
    blocks.launch(server_name="127.0.0.1", server_port=given.port, share=False)


def load_gradio() -> Any:
    """Import gradio; raise `ConfigError` that names the extra to install if it is missing."""
    try:
        import gradio  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("`mmrl compare-answers` needs gradio; install mmrl[ui]") from error
    return gradio


def ask_both(sessions: Sequence[Session]) -> Callable[..., list[Outcome]]:
    """Return a function that asks all sessions a question, with optional paths of an image and a video."""

    def ask(question: str, image: str | None = None, video: str | None = None) -> list[Outcome]:
        media = [[image] if image else None], [[video] if video else None]
        return [row.outcomes[-1] for session in sessions for row in session.ask([question], *media)]

    return ask


def page(gradio: Any, ask: Callable[..., list[Outcome]], names: Sequence[str]) -> Any:
    """Build the page: fields for a question and a file, and one column per model with its answer."""
    from mmrl.inference.session import images_of

    with gradio.Blocks(title="mmrl compare-answers") as blocks:
        question = gradio.Textbox(label="Question", lines=2)
        with gradio.Row():
            image, video = gradio.Image(label="Image", type="filepath"), gradio.Video(label="Video")
        button = gradio.Button("Ask both")
        with gradio.Row():
            columns = [(gradio.Textbox(label=name, lines=8), gradio.Gallery(label=name)) for name in names]

        def shown(*asked: str | None) -> list[Any]:
            # Each model's column has a text field and an image field; an answer fills one of them.
            values: list[Any] = []
            for answer in ask(*asked):
                values += [answer.text or "", images_of(answer)]
            return values

        outputs = [part for column in columns for part in column]
        button.click(shown, [question, image, video], outputs)
        question.submit(shown, [question, image, video], outputs)
    return blocks
