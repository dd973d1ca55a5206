"""Command `mmrl serve-command`: prints the command lines that start the servers of a run."""

from __future__ import annotations

import argparse

from mmrl.cli.command import CONFIG, OVERRIDES, argument, command
from mmrl.config.loading import ConfigError
from mmrl.config.nesting import engines_with_policies
from mmrl.config.stages import load_stages, on_each


@command(
    CONFIG,
    OVERRIDES,
    argument("--cpu", action="store_true", help="for servers on CPUs"),
    examples=("mmrl serve-command my_run.yaml", "mmrl serve-command my_run.yaml --cpu"),
)
def serve_command(given: argparse.Namespace) -> None:
    """Print the command lines that start the servers of a run: for rollouts, judges and teachers."""
    from mmrl.build import check

    stages = load_stages(given.config, given.overrides)
    checked = on_each([stage.place for stage in stages], lambda i: check(stages[i].config))
    lines: dict[str, None] = {}
    for stage, pieces in zip(stages, checked, strict=True):
        asked = [("engine", piece, policy) for _, piece, policy in engines_with_policies(stage.config)]
        references = getattr(stage.config, "references", {}).values()
        asked += [("reference", piece, stage.config.policy) for piece in references]
        for kind, piece, policy in asked:
            commands = getattr(pieces.check(kind, piece).target, "serve_commands", None)
            lines |= dict.fromkeys(commands(policy, piece.options, cpu=given.cpu) if commands else ())
    if not lines:
        raise ConfigError(
            f"'{given.config}' asks no servers; list `vision.vllm` in `rollout.engine`, or "
            "`vision.served_teacher` in `references`"
        )
    print("\n".join(lines))
