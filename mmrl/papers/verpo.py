"""VeRPO (arXiv 2601.03525): code earns a reward for each unit test that it passes on a server.

Title: VeRPO: Verifiable Dense Reward Policy Optimization for Code Generation
Formula: reward = sum_j w_j [passes j], w_j = exp(-alpha p_j) / (N_j + eps), N_j = sum_l exp(-(p_j - p_l)^2
/ (2 sigma^2)).
Our reading: the weights of tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import torch

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability, Tags
from mmrl.config.registry import advantage, reward
from mmrl.core.answer_text import tagged
from mmrl.core.reward_table import RewardTable
from mmrl.core.tensor import rarity
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import RowError
from mmrl.rewards.adapters import comparable_outcomes
from mmrl.rewards.http import Http, as_json
from mmrl.runtime.scoring import shown

FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)


@reward
class TestPasses(Http):
    """Reward code for the unit tests that it passes, which a server runs (VeRPO, arXiv 2601.03525).

    Nothing that a model writes is executed here: sent is `{"runs": [{"uid", "code", "tests"}, ...]}` by POST,
    expected is `{"passed": [[true, false, ...], ...]}`, for every run a list with an entry per test, or null
    where it could not be run at all, which is a fault as for any reward. The server has to jail the code.
    Equal runs of a step are sent once. An answer without code passes nothing; None where there are no tests.

    Args:
        url: Address of the server, http:// or https://.
        column: Column of the data with the list of tests, in whatever form the server reads.
        tag: Tag of the blocks that hold code, of which the last counts; empty: fenced blocks of Markdown.
        form: The `share` of the tests that pass; `all`: 1 where every one passes, else 0; `rarity`: the sum
            of weights of those that pass, where rare and isolated ones of the prompt weigh more. Pass rates
            are over all answers to the prompt, and over all their turns with `at: every`.
        alpha: Of `rarity`: how much rarer passes weigh more.
        sigma: Of `rarity`: distance of pass rates within which tests share their weight.
        batch: As for `http`.
        parallel: As for `http`.
        request_timeout: As for `http`; the time of all runs of a request.
        request_retries: As for `http`.
        wait: As for `http`.
    """

    __test__ = False  # pytest would take it for a class of tests

    def __init__(
        self,
        *,
        url: str,
        column: str = "tests",
        tag: str = "",
        form: Literal["share", "all", "rarity"] = "share",
        alpha: NonNegativeFloat = 1.0,
        sigma: PositiveFloat = 0.2,
        batch: PositiveInt = 64,
        parallel: PositiveInt = 4,
        request_timeout: PositiveFloat = 60.0,
        request_retries: NonNegativeInt = 2,
        wait: NonNegativeFloat = 0.5,
    ) -> None:
        super().__init__(
            url=url,
            batch=batch,
            parallel=parallel,
            request_timeout=request_timeout,
            request_retries=request_retries,
            wait=wait,
        )
        self.column, self.tag, self.form = column, tag, form
        self.alpha, self.sigma = alpha, sigma

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        passed = self._passed(prompts, outcomes)
        rewards: list[float | None] = [None] * len(outcomes)
        for rows in comparable_outcomes(prompts):
            known = [i for i in rows if passed[i] is not None]
            if not known:
                continue
            table = torch.tensor([passed[i] for i in known], dtype=torch.float64)  # (answers, tests)
            if self.form == "all":
                values = (table == 1).all(1).double()
            elif self.form == "share":
                values = table.mean(1)
            else:
                rate = table.mean(0)[None, :, None]
                known_tests = torch.ones_like(rate, dtype=torch.bool)
                values = table @ rarity(rate, known_tests, alpha=self.alpha, sigma=self.sigma)[0, :, 0]
            for i, value in zip(known, values.tolist(), strict=True):
                rewards[i] = value
        return rewards

    def _passed(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[list[bool] | None]:
        """Ask which tests every outcome passes; None where its prompt has no tests."""
        tests = {prompt.uid: self._tests(prompt) for prompt in prompts}
        runs: dict[tuple[str, str], int] = {}
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            if tests[prompt.uid] and (code := code_of(outcome.text or "", self.tag)):
                runs.setdefault((prompt.uid, code), len(runs))
        asked = [{"uid": uid, "code": code, "tests": tests[uid]} for uid, code in runs]
        found = self.ask(asked, "runs", "passed")
        passed: list[list[bool] | None] = []
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            count = len(tests[prompt.uid] or ())
            place = runs.get((prompt.uid, code_of(outcome.text or "", self.tag)))
            result = [False] * count if place is None else found[place]
            match result:
                case [*entries] if len(entries) == count and all(type(entry) is bool for entry in entries):
                    passed.append(entries if count else None)
                case _:
                    raise ValueError(
                        f"'{self.url}' must give {count} times true or false for the tests of prompt "
                        f"'{prompt.uid}', not {shown(result)}"
                    )
        return passed

    def _tests(self, prompt: Prompt) -> list | None:
        """Read the tests of a prompt; raises `RowError` unless they are a list."""
        tests = prompt.columns.get(self.column)
        if tests is None:
            return None
        if not isinstance(tests, list | tuple) or not tests:
            raise RowError(
                f"wanted a list of tests in the column '{self.column}' of prompt '{prompt.uid}', got "
                f"{shown(tests)}"
            )
        return as_json(list(tests), f"the tests of prompt '{prompt.uid}'")


def code_of(text: str, tag: str = "") -> str:
    """Return the code of an answer: its last block of a tag, or else fenced one; empty without any."""
    blocks = tagged(text, tag) if tag else FENCED.findall(text)
    return blocks[-1].strip() if blocks else ""


@advantage
def rarity_weights(
    table: RewardTable,
    *,
    alpha: NonNegativeFloat = 1.0,
    sigma: PositiveFloat = 0.2,
    eps: PositiveFloat = 1e-6,
    by: Tags = ("group",),
) -> RewardTable:
    """Add up checks of an answer, rare and isolated ones weighing more (VeRPO, arXiv 2601.03525).

    Every reward is a check that passes (1) or fails (0), such as a unit test. Check j with pass rate p_j in
    the group weighs exp(-alpha p_j) / (N_j + eps), where N_j = sum_l exp(-(p_j - p_l)^2 / (2 sigma^2)) counts
    checks of about its difficulty; its configured weight is a further factor. It stands for `total`, before
    `group_center`. The constants are our reading.

    Args:
        alpha: How much rarer passes weigh more.
        sigma: Distance of pass rates within which checks share their weight.
        eps: Added to the counts.
        by: Keys that define a group; pass rates are over all its outcomes.
    """
    groups = table.groups(by)
    # A check of another prompt does not count.
    weight = rarity(groups.mean(), groups.count() > 0, alpha=alpha, sigma=sigma, eps=eps)
    given = torch.tensor(list(table.weights.values()), dtype=torch.float64)[:, None]
    passed = torch.where(table.valid, table.values, 0.0)
    return table.replace(
        values=(given * weight * passed).sum(1, keepdim=True),
        valid=table.valid.any(1, keepdim=True),
        weights={"total": 1.0},
    )


@advantage(every_turn=True)
def turn_discount(table: RewardTable, *, gamma: Probability = 0.9) -> RewardTable:
    """Multiply rewards by gamma once for every turn of their conversation (VeRPO, arXiv 2601.03525).

    So of two conversations that solve a task the shorter one earns more. Put it before the rewards of turns
    are merged (`per_episode`). The paper's gamma is not known: 0.9 is our reading.
    """
    turns = table.present.sum(-1)[:, None, None].double()
    return table.put(table.values * gamma**turns)
