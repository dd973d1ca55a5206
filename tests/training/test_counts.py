"""Metrics of several processes: counts are added up, other numbers averaged."""

from __future__ import annotations

import json

from mmrl.core.types import Count
from mmrl.training.loop import train
from tests.support.toys import ToyGenerate, toy_run


class Restarting(ToyGenerate):
    """Tell a count and a number that is none."""

    def pop_metrics(self):
        return {"workers/restarts": Count(1), "tools/turns": 3.0}


def test_counts_of_processes_are_added_up_and_other_numbers_averaged(tmp_path):
    run = toy_run(tmp_path, max_steps=1, rollout={"engine": [f"{__name__}:Restarting"]})
    describe = run.report.describe

    def of_two(*given):
        processes = run.processes
        processes.world = 2
        numbers = {"workers/restarts": 2.0, "tools/turns": 4.0, "steps": 0.0, "sum": 0.0}
        other = json.dumps([numbers, ["workers/restarts"]]).encode()
        processes._all_bytes = lambda data: [data, other]
        try:
            return describe(*given)
        finally:
            processes.world = 1

    run.report.describe = of_two
    train(run)
    (record,) = run.journal.read()
    assert record["workers/restarts"] == 3  # 1 + 2
    assert record["tools/turns"] == 3.5  # (3 + 4) / 2
