"""Trackers: a run's metrics on the dashboards of tensorboard, wandb and trackio, through accelerate.

A tracker is made when a run is built, so that a missing package is an error before a weight is loaded. The
main process alone opens it, once the first step is known, so that a resumed run continues the same curves.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mmrl.config.registry import tracker
from mmrl.config.schema import ConfigError

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

ID = "tracker_id"  # file in the output folder: the run's id on dashboards


def run_id(folder: Path) -> str:
    """Return the id of a run on dashboards: random, and kept in its folder, so a new folder is a new run."""
    path = folder / ID
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


class AccelerateTracker:
    """Base class of the trackers: a package that must be there, and the tracker of accelerate for it."""

    package: ClassVar[str]

    def __init__(self, required: bool) -> None:
        spec = find_spec(self.package)
        # A folder of that name in the working directory, as wandb leaves one, has no origin.
        self.installed = spec is not None and spec.origin is not None
        self.tracker: GeneralTracker | None = None
        if required and not self.installed:
            raise ConfigError(
                f"report.trackers asks for {self.package}, which is not installed; pip install "
                f"'mmrl[{self.package}]', or take it off the list"
            )

    def open(self, folder: Path, config: Mapping[str, Any], start: int) -> str:
        """Start at a step, and return a line for the console, which may be empty."""
        if not self.installed:
            return f"{self.package} is not installed, so it receives no metrics; install mmrl[{self.package}]"
        self.tracker, line = self.start(folder, dict(config), start)
        return line

    def start(self, folder: Path, config: dict[str, Any], step: int) -> tuple[GeneralTracker, str]:
        """Start a tracker of accelerate, and return it with the line for the console."""
        raise NotImplementedError

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""
        if self.tracker is not None:
            self.tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run of the dashboard."""
        if self.tracker is not None:
            self.tracker.finish()


@tracker
class Tensorboard(AccelerateTracker):
    """Write event files for tensorboard into `output_dir/tensorboard`.

    Events that a killed run wrote after the checkpoint it resumes from are hidden.

    Args:
        required: Whether a missing package is an error; otherwise it is a line on the console.
    """

    package = "tensorboard"

    def __init__(self, *, required: bool = True) -> None:
        super().__init__(required)

    def start(self, folder: Path, config: dict[str, Any], step: int) -> tuple[GeneralTracker, str]:
        """Start a tracker that hides the events from a step on."""
        from accelerate.tracking import TensorBoardTracker

        made = TensorBoardTracker("tensorboard", logging_dir=folder, purge_step=step or None)
        made.start()
        return made, ""


@tracker
class Wandb(AccelerateTracker):
    """Send metrics to Weights & Biases.

    A resumed run has the same id. Steps that the dashboard has already keep their first values, which are
    the same, since a run resumes exactly.

    Args:
        project: Project of the dashboard.
        run_name: Name of the run; by default that of its folder.
        mode: `offline` writes into `output_dir/wandb`, from where `wandb sync` sends; `disabled` drops all.
        required: Whether a missing package is an error; otherwise it is a line on the console.
    """

    package = "wandb"

    def __init__(
        self,
        *,
        project: str = "mmrl",
        run_name: str = "",
        mode: Literal["online", "offline", "disabled"] = "online",
        required: bool = True,
    ) -> None:
        super().__init__(required)
        self.project, self.run_name, self.mode = project, run_name, mode

    def start(self, folder: Path, config: dict[str, Any], step: int) -> tuple[GeneralTracker, str]:
        """Start, or resume the run of the same id."""
        import wandb
        from accelerate.tracking import WandBTracker

        made = WandBTracker(
            self.project,
            name=self.run_name or folder.name,
            id=run_id(folder),
            resume="allow",  # continues the run of this id, or starts it
            mode=self.mode,
            dir=str(folder),
            config=config,
            settings=wandb.Settings(silent=True, console="off"),  # the console is the run's own
        )
        try:
            made.start()
        except wandb.Error as error:
            raise RuntimeError(
                f"wandb does not start: {error}. Run `wandb login` once, or set `mode: offline` in it"
            ) from error
        run = made.tracker
        return made, f"wandb: {run.url if self.mode == 'online' else run.dir}"


@tracker
class Trackio(AccelerateTracker):
    """Send metrics to trackio, on this machine or in a Space of the Hugging Face Hub.

    A resumed run has the same name, by which trackio knows runs. Steps that it repeats after a kill are in
    the dashboard twice, with the same values.

    Args:
        project: Project of the dashboard.
        run_name: Name of the run; by default that of its folder followed by an id.
        space_id: Space (`user/name`) to send to; empty keeps metrics on this machine.
        required: Whether a missing package is an error; otherwise it is a line on the console.
    """

    package = "trackio"

    def __init__(
        self, *, project: str = "mmrl", run_name: str = "", space_id: str = "", required: bool = True
    ) -> None:
        super().__init__(required)
        self.project, self.run_name, self.space_id = project, run_name, space_id

    def start(self, folder: Path, config: dict[str, Any], step: int) -> tuple[GeneralTracker, str]:
        """Start, or resume the run of the same name."""
        from accelerate.tracking import TrackioTracker

        name = self.run_name or f"{folder.name}-{run_id(folder)}"
        options = {"name": name, "space_id": self.space_id or None, "resume": "allow", "embed": False}
        made = TrackioTracker(self.project, config=config, **options)
        made.start()
        return made, f"trackio: project {self.project}, run {name}"
