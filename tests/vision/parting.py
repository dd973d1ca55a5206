"""Conversations of tiny models that part at their turns, with tools that are called by a rule."""

from __future__ import annotations

from mmrl.vision.engines.with_step_candidates import WithStepCandidates
from mmrl.vision.engines.with_turn_branches import WithTurnBranches
from tests.vision.talking import Talkative


class Branching(Talkative, WithTurnBranches):
    """A tree of them."""


class Stepwise(Talkative, WithStepCandidates):
    """Candidates of their turns."""
