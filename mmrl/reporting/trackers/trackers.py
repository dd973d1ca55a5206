"""Dashboards behind one interface: tensorboard, wandb and trackio.

A tracker is made when a run is built, so that one that is not installed is noticed before a weight is loaded;
it is opened by the main process alone, once it is known where the run goes on. A run that goes on after a
stop goes on in the same place of the dashboard.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mmrl.config.registry import tracker
from mmrl.config.schema import ConfigError

ID = "tracker_id"  # file in the output folder: how dashboards know the run


def installed(name: str, module: str, required: bool) -> bool:
    """Tell whether a package is there; where it is `required` and is not, say what to do."""
    spec = find_spec(module)
    # A folder of that name in the working directory, as wandb leaves one, has no origin.
    there = spec is not None and spec.origin is not None
    if required and not there:
        raise ConfigError(
            f"report.trackers asks for {name}, which is not installed; pip install 'mmrl[{name}]', or take "
            "it off the list"
        )
    return there


def run_id(folder: Path) -> str:
    """Name a run for dashboards: drawn once, and kept in its folder, so that a folder that is thrown away is
    another run."""
    path = folder / ID
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


@tracker
class Tensorboard:
    """Write event files for tensorboard into `output_dir/tensorboard`.

    What a run wrote behind the checkpoint that it goes on from is hidden. `required: false` only says so
    where tensorboard is not installed.
    """

    def __init__(self, *, required: bool = True) -> None:
        self.there = installed("tensorboard", "tensorboard", required)
        self.writer = None

    def open(self, folder: Path, config: Mapping[str, Any], start: int) -> str:
        """Begin at a step, and give what there is to say."""
        if not self.there:
            return "tensorboard is not installed, so no curves are written for it; install mmrl[tensorboard]"
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start or None)
        return ""

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass on the numbers of a step."""
        if self.writer is not None:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    def close(self) -> None:
        """Finish."""
        if self.writer is not None:
            self.writer.close()


class Session:
    """A run of a dashboard that is logged to until it is finished."""

    run: Any = None

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass on the numbers of a step."""
        if self.run is not None:
            self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish."""
        if self.run is not None:
            self.run.finish()


@tracker
class Wandb(Session):
    """Send numbers to Weights & Biases, or with `mode: offline` into `output_dir/wandb`, from where `wandb
    sync` sends them.

    The run's `name` is that of its folder unless it is given. A run that goes on has the same id; steps that
    the dashboard has seen stay as they are, and since a run goes on exactly they are what would come again.
    """

    def __init__(
        self,
        *,
        project: str = "mmrl",
        name: str = "",
        mode: Literal["online", "offline", "disabled"] = "online",
        required: bool = True,
    ) -> None:
        self.there = installed("wandb", "wandb", required)
        self.project, self.name, self.mode = project, name, mode

    def open(self, folder: Path, config: Mapping[str, Any], start: int) -> str:
        """Begin at a step, and give what there is to say."""
        if not self.there:
            return "wandb is not installed, so nothing is sent to it; install mmrl[wandb]"
        import wandb

        try:
            self.run = wandb.init(
                project=self.project,
                name=self.name or folder.name,
                id=run_id(folder),
                resume="allow",
                mode=self.mode,
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise RuntimeError(
                f"wandb does not begin: {error}. Run `wandb login` once, or set `mode: offline` on the "
                "tracker"
            ) from error
        return f"wandb: {self.run.url if self.mode == 'online' else self.run.dir}"


@tracker
class Trackio(Session):
    """Keep numbers with trackio: on this machine, or with `space_id` in a Space of the Hugging Face Hub.

    trackio knows runs by their name, so that of the folder is followed by an id, unless a `name` is given. A
    run that goes on has the same name. Steps that it takes again after a kill stand there twice, with the
    same numbers.
    """

    def __init__(
        self, *, project: str = "mmrl", name: str = "", space_id: str = "", required: bool = True
    ) -> None:
        self.there = installed("trackio", "trackio", required)
        self.project, self.name, self.space_id = project, name, space_id

    def open(self, folder: Path, config: Mapping[str, Any], start: int) -> str:
        """Begin at a step, and give what there is to say."""
        if not self.there:
            return "trackio is not installed, so nothing is kept with it; install mmrl[trackio]"
        import trackio

        name = self.name or f"{folder.name}-{run_id(folder)}"
        self.run = trackio.init(
            project=self.project,
            name=name,
            space_id=self.space_id or None,
            config=dict(config),
            resume="allow",
            embed=False,
        )
        return f"trackio: project {self.project}, run {name}"
