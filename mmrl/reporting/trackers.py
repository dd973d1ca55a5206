"""Trackers that send metrics to tensorboard, wandb and trackio through accelerate.

The constructor checks, before weights are loaded, that the package is installed. The main process opens the
tracker at the run's first or resumed step, so that a resumed run continues its curves.
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

ID = "tracker_id"  # file in the output folder with the run's dashboard id


def run_id(folder: Path) -> str:
    """Return the dashboard id of a run: a random id, stored in the run's folder."""
    path = folder / ID
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


class AccelerateTracker:
    """Base class of trackers that use a tracker of accelerate; its package can be missing.

    Args:
        required: Raise an error if the package is missing; otherwise print a line on the console.
    """

    package: ClassVar[str]

    def __init__(self, *, required: bool = True) -> None:
        spec = find_spec(self.package)
        # A local folder `wandb/` also imports, as a namespace package, but has no `origin`.
        self.installed = spec is not None and spec.origin is not None
        self.tracker: GeneralTracker | None = None
        if required and not self.installed:
            raise ConfigError(
                f"report.trackers asks for {self.package}, which is not installed; pip install "
                f"'mmrl[{self.package}]', or take it off the list"
            )

    def open(self, folder: Path, config: Mapping[str, Any], start: int) -> str:
        """Start tracking at a step; return a line for the console, or ""."""
        if not self.installed:
            return f"{self.package} is not installed, so it receives no metrics; install mmrl[{self.package}]"
        self.tracker, line = self.start(folder, dict(config), start)
        return line

    def start(self, folder: Path, config: dict[str, Any], step: int) -> tuple[GeneralTracker, str]:
        """Start a tracker of accelerate; return the tracker and a line for the console."""
        raise NotImplementedError

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""
        if self.tracker is not None:
            self.tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run on the dashboard."""
        if self.tracker is not None:
            self.tracker.finish()


@tracker
class Tensorboard(AccelerateTracker):
    """Write event files of tensorboard into `output_dir/tensorboard`.

    A resumed run hides the events after its checkpoint.

    Args:
        required: Raise an error if the package is missing; otherwise print a line on the console.
    """

    package = "tensorboard"

    def start(self, folder: Path, config: dict[str, Any], step: int) -> tuple[GeneralTracker, str]:
        """Start a tracker that hides already written events from `step` on."""
        from accelerate.tracking import TensorBoardTracker

        tracker = TensorBoardTracker("tensorboard", logging_dir=folder, purge_step=step or None)
        tracker.start()
        return tracker, ""


@tracker
class Wandb(AccelerateTracker):
    """Send metrics to Weights & Biases.

    A resumed run has the same id. If it repeats steps, the dashboard keeps the old values, which are equal.

    Args:
        project: Project of the dashboard.
        run_name: Name of the run; by default the name of its folder.
        mode: `online`: send. `offline`: write to `output_dir/wandb` for `wandb sync`. `disabled`: do nothing.
        required: Raise an error if the package is missing; otherwise print a line on the console.
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
        super().__init__(required=required)
        self.project, self.run_name, self.mode = project, run_name, mode

    def start(self, folder: Path, config: dict[str, Any], step: int) -> tuple[GeneralTracker, str]:
        """Start a run of wandb, or resume the run with the same id."""
        import wandb
        from accelerate.tracking import WandBTracker

        tracker = WandBTracker(
            self.project,
            name=self.run_name or folder.name,
            id=run_id(folder),
            resume="allow",
            mode=self.mode,
            dir=str(folder),
            config=config,
            settings=wandb.Settings(silent=True, console="off"),  # do not record console output
        )
        try:
            tracker.start()
        except wandb.Error as error:
            raise RuntimeError(
                f"wandb does not start: {error}. Run `wandb login` once, or set `mode: offline` in it"
            ) from error
        run = tracker.tracker
        return tracker, f"wandb: {run.url if self.mode == 'online' else run.dir}"


@tracker
class Trackio(AccelerateTracker):
    """Send metrics to trackio, on this machine or in a Space of the Hugging Face Hub.

    A resumed run has the same name. If it repeats steps, the dashboard shows them twice, with equal values.

    Args:
        project: Project of the dashboard.
        run_name: Name of the run; by default the name of its folder and an id.
        space_id: Space (`user/name`) of the hub; empty: this machine.
        required: Raise an error if the package is missing; otherwise print a line on the console.
    """

    package = "trackio"

    def __init__(
        self, *, project: str = "mmrl", run_name: str = "", space_id: str = "", required: bool = True
    ) -> None:
        super().__init__(required=required)
        self.project, self.run_name, self.space_id = project, run_name, space_id

    def start(self, folder: Path, config: dict[str, Any], step: int) -> tuple[GeneralTracker, str]:
        """Start a run of trackio, or resume the run with the same name."""
        from accelerate.tracking import TrackioTracker

        name = self.run_name or f"{folder.name}-{run_id(folder)}"
        options = {"name": name, "space_id": self.space_id or None, "resume": "allow", "embed": False}
        tracker = TrackioTracker(self.project, config=config, **options)
        tracker.start()
        return tracker, f"trackio: project {self.project}, run {name}"
