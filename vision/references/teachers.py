"""Several teachers for distillation; a data column chooses the teacher of every row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch

from mmrl.config.binding import Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.registry import find, reference
from mmrl.config.schema import Piece, as_piece
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import pad_to
from mmrl.core.types import Prompt
from mmrl.vision.references.teacher import FrozenTeacher

PLACE = "references.*.teachers"


@reference
class Teachers(FrozenTeacher):
    """Several teachers for distillation; a data column chooses the teacher of every row.

    Teachers have separate options, so that one may run in this process and another on servers.

    Args:
        by: Column with the source of a row.
        teachers: Maps names to teachers, `vision.teacher` or `vision.served_teacher`.
        sources: Maps values of the column to names in `teachers`; empty: each value is such a name.
    """

    def __init__(
        self,
        policy: Any,  # `vision.tokens`
        *,
        by: str,
        teachers: Mapping[str, Any],
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.policy, self.by, self.sources = policy, by, sources_of(teachers, sources)
        pieces = Pieces(Stream())
        self.teachers = {
            name: pieces.make("reference", piece, policy, place=f"{PLACE}.{name}")
            for name, piece in pieces_of(teachers).items()
        }
        if pieces.scheduled or pieces._scheduled:
            raise ConfigError(f"{PLACE}: options of several teachers cannot follow a schedule")

    @staticmethod
    def check_folders(options: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the folder of a teacher lacks weights."""
        for piece in pieces_of(options["teachers"]).values():
            if check := getattr(find("reference", piece.name).target, "check_folders", None):
                check(piece.options)

    @staticmethod
    def check_run(options: Mapping[str, Any], config: Any) -> None:
        """Raise `ValueError` for a source without a teacher, or a teacher that does not fit the policy."""
        sources_of(options["teachers"], options.get("sources"))
        for name, piece in pieces_of(options["teachers"]).items():
            target = Pieces(Stream()).check("reference", piece, f"{PLACE}.{name}").target
            if not isinstance(target, type) or not issubclass(target, FrozenTeacher) or target is Teachers:
                raise ConfigError(f"'{piece.name}' is no teacher; name `vision.teacher` or another one")
            target.check_run(piece.options, config)

    @staticmethod
    def check_prompts(options: Mapping[str, Any], prompts: Iterable[Prompt]) -> None:
        """Raise `ConfigError` for a prompt whose source has no teacher, or whose teacher cannot read it."""
        sources = sources_of(options["teachers"], options.get("sources"))
        groups: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            groups.setdefault(teacher_of(prompt, str(options["by"]), sources), []).append(prompt)
        for name, piece in pieces_of(options["teachers"]).items():
            if check := getattr(find("reference", piece.name).target, "check_prompts", None):
                check(piece.options, groups.get(name, []))

    @staticmethod
    def serve_commands(policy: Piece, options: Mapping[str, Any], *, cpu: bool = False) -> list[str]:
        """Return the command lines that start the servers of all teachers."""
        lines = []
        for piece in pieces_of(options["teachers"]).values():
            if commands := getattr(find("reference", piece.name).target, "serve_commands", None):
                lines += commands(policy, piece.options, cpu=cpu)
        return lines

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        encoder, steps = self.policy.prompt_encoder, batch.steps
        named = [teacher_of(encoder.sources.of(prompt)[0], self.by, self.sources) for prompt in steps.prompts]
        chosen = [named[number] for number in steps.which.tolist()]
        rows, outputs = [], []
        for name, teacher in self.teachers.items():
            mine = torch.tensor([row for row, other in enumerate(chosen) if other == name], dtype=torch.int64)
            if len(mine):
                output = teacher(batch.select(mine), extra)
                rows.append(mine)
                outputs.append({"logp": output.logp, **output.extra})
        back = torch.cat(rows).argsort()
        values = {name: joined(outputs, name, rows)[back] for name in {n for one in outputs for n in one}}
        return StepOutput(values.pop("logp"), values)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all teachers by name."""
        return {name: teacher.state_dict() for name, teacher in self.teachers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of all teachers."""
        for name, teacher in self.teachers.items():
            teacher.load_state_dict(state.get(name, {}))


def joined(outputs: list[dict[str, torch.Tensor]], name: str, rows: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate an output of several teachers; rows without this output are 0, shorter entries padded."""
    first = next(one[name] for one in outputs if name in one)
    last = [one[name].shape[2:] for one in outputs if name in one]
    fill = -1.0 if name == "top_k_ids" else 0.0  # -1 marks "no token"
    parts = []
    for one, mine in zip(outputs, rows, strict=True):
        part = one.get(name)
        if part is None:
            part = first.new_full((len(mine), *first.shape[1:]), fill)
        parts.append(pad_to(part, max(shape[0] for shape in last), 2, fill) if last[0] else part)
    return torch.cat([part.to(first.device) for part in parts])


def pieces_of(teachers: Mapping[str, Any]) -> dict[str, Piece]:
    """Read the teachers of a configuration."""
    return {name: as_piece(value, f"{PLACE}.{name}") for name, value in teachers.items()}


def sources_of(teachers: Mapping[str, Any], sources: Mapping[str, str] | None) -> Mapping[str, str]:
    """Map sources to names of teachers; raises `ConfigError` for a name that is no teacher."""
    if not teachers:
        raise ConfigError("`teachers` must name one teacher or more")
    sources = sources or {name: name for name in teachers}
    for source, name in sources.items():
        if name not in teachers:
            raise ConfigError(
                f"`sources` gives '{source}' the teacher '{name}'; there are {', '.join(teachers)}"
            )
    return sources


def teacher_of(prompt: Prompt, by: str, sources: Mapping[str, str]) -> str:
    """Name the teacher of a prompt; raises `ConfigError` for an unknown source."""
    source = prompt.columns.get(by)
    if str(source) not in sources:
        what = f"the source '{source}' in the column '{by}'" if by in prompt.columns else f"no column '{by}'"
        raise ConfigError(
            f"prompt '{prompt.uid}' has {what}, and there are teachers for {', '.join(sources)}; add it to "
            "`sources`"
        )
    return sources[str(source)]
