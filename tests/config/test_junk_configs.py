"""Junk configurations end in an error of configuration, or are accepted; never in a traceback."""

from __future__ import annotations

import random
import traceback
from pathlib import Path

from mmrl.build import check
from mmrl.cli.check import check_file
from mmrl.config.loading import read
from mmrl.config.schema import Config, ConfigError, load
from tests.support import junk
from tests.support.quick import FUZZ

CONFIGS = Path(__file__).parents[2] / "configs"


def test_junk_configurations_end_in_config_errors_or_are_accepted(tmp_path):
    draw = random.Random(20)
    configs = [
        read(path)
        for folder in ("train", "evaluate", "build", "methods")
        for path in sorted((CONFIGS / folder).rglob("*.yaml"))
    ]
    refused, wrong = 0, []
    for number in range(FUZZ):
        path, overrides = junk.write(tmp_path / "junk.yaml", configs, draw)
        try:
            if overrides:
                check(load(path, overrides, Config))
            else:
                check_file(path)
        except ConfigError as error:
            assert str(error)
            refused += 1
        except Exception:
            text = path.read_text(errors="replace")[:2000] if path.is_file() else "no file"
            wrong.append(f"{number} {overrides}: {traceback.format_exc(limit=-4)}\n{text}")
    assert not wrong, f"{len(wrong)} tracebacks\n" + "\n\n".join(wrong)
    assert refused > FUZZ / 2  # accepted is what a mutation left whole
