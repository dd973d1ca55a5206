"""Turns and branches of answers that servers sample, and log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.types import Prompt, Rollouts
from mmrl.vision.decoding.branching import Branch, Grown
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.decoding.token_steps import continued
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.serving.groups import AsksServers, Group

MOST_LISTED = 19  # tokens listed per request: 20 of vLLM's `--max-logprobs`, less the sampled one
Given = tuple[EncodedPrompt, Sequence[int]]  # prompt, and tokens whose log-probabilities are requested


def listed(settings: Mapping[str, Any], tokens: Sequence[int], temperature: float) -> dict[str, Any]:
    """Change sampling settings to request the log-probabilities of some tokens as the next token.

    The list ends with the first token again, because the server returns one entry less than the sampled
    token and the listed tokens together.
    """
    plain = {"n": 1, "max_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    asked = {"logprobs": len(tokens) + 1, "logprob_token_ids": [*tokens, tokens[0]]}
    return {**settings, **plain, **asked}


def next_logp(
    engine: AsksServers, asked: Sequence[Given], temperature: float, version: str
) -> list[list[float]]:
    """Request the log-probabilities of given next tokens; temperature 0 (greedy) is replaced by 1."""
    shares = [
        [tokens[at : at + MOST_LISTED] for at in range(0, len(tokens), MOST_LISTED)] for _, tokens in asked
    ]
    groups = []
    for (encoded, _), parts in zip(asked, shares, strict=True):
        base = engine.request(encoded, 1, 1, 0, version, temperature)
        for part in parts:
            request = {**base, "sampling_params": listed(base["sampling_params"], part, temperature)}
            answers = engine.asking.ask(encoded.uid, request)
            groups.append(Group(Prompt(encoded.uid, ()), encoded, [0], temperature, request, answers))
    found = iter([group.answers.result()[0][0].listed for group in groups])
    logp = [[value for part in parts for value in map(next(found).__getitem__, part)] for parts in shares]
    engine.compare_groups(groups, version)
    return logp


def grow_on_servers(
    engine: AsksServers, branches: Sequence[Branch], temperature: float
) -> list[Grown | None]:
    """Sample branches on servers, parents before children; servers recognise shared prefixes by tokens.

    The first random number of a branch is its seed. The result is None for a branch whose parent ends before
    the branch begins.
    """
    grown: dict[int, Grown | None] = {}
    version = engine.load_weights()
    with engine.asking.collecting():
        while len(grown) < len(branches):
            ready = [
                number
                for number, branch in enumerate(branches)
                if number not in grown and (branch.parent is None or branch.parent in grown)
            ]
            given = {number: _given(branches[number], grown) for number in ready}
            grown |= {number: None for number, before in given.items() if before is None}
            begun = {number: before for number, before in given.items() if before is not None}
            new = {number: branches[number] for number in begun}
            grown |= _grown(engine, new, begun, temperature, version)
    return [grown[number] for number in range(len(branches))]


def _given(branch: Branch, grown: Mapping[int, Grown | None]) -> tuple[Tensor, Tensor] | None:
    """Return a branch's given tokens (parent's and forced) with log-probabilities, NaN for forced tokens."""
    unknown = torch.full((len(branch.forced),), torch.nan)
    if branch.parent is None:
        return branch.forced, unknown
    parent = grown[branch.parent]
    if parent is None or not parent.begins(branch.start):
        return None
    ids, logp = parent.ids[: branch.start], parent.logp[: branch.start]
    return torch.cat([ids, branch.forced]), torch.cat([logp, unknown])


def _grown(
    engine: AsksServers,
    branches: Mapping[int, Branch],
    given: Mapping[int, tuple[Tensor, Tensor]],
    temperature: float,
    version: str,
) -> dict[int, Grown]:
    """Sample branches whose parents are finished, and score their forced tokens."""
    sampled = [number for number, branch in branches.items() if len(branch.uniform)]
    turns = []
    for number in sampled:
        branch = branches[number]
        encoded = continued(branch.encoded, given[number][0])
        turns.append(GenerationRequest(Prompt(encoded.uid, ()), 0, encoded, branch.uniform))
    groups = engine.begin_turns(turns, version, temperature)
    scored = [number for number, branch in branches.items() if branch.scored and len(branch.forced)]
    asked: list[Given] = []
    for number in scored:
        branch, ids = branches[number], given[number][0]
        places = range(branch.start, branch.given)
        asked += [(continued(branch.encoded, ids[:place]), [int(ids[place])]) for place in places]
    logp = iter(next_logp(engine, asked, temperature, version))
    for number in scored:
        branch = branches[number]
        values = torch.tensor([next(logp)[0] for _ in branch.forced])
        given[number][1][branch.start : branch.given] = values
    answers = {number: group.answers.result()[0][0] for number, group in zip(sampled, groups, strict=True)}
    engine.compare_groups(groups, version)
    grown = {}
    for number, (ids, known) in given.items():
        answer = answers.get(number)
        if answer is not None:
            ids, known = torch.cat([ids, answer.ids]), torch.cat([known, answer.logp])
        grown[number] = Grown(ids, known, None, answer is not None and answer.stopped)
    return grown


@dataclass(frozen=True, eq=False)
class ServedTurns:
    """Samples the turns of conversations from servers, which keep the keys and values of earlier turns."""

    engine: AsksServers
    version: str

    def sample(self, requests: Sequence[GenerationRequest]) -> Rollouts:
        """Sample one turn for every request, in order; tools are called as soon as a turn arrives."""
        engine = self.engine
        with engine.asking.collecting():
            groups = engine.begin_turns(requests, self.version)
            asked = {group.answers: request for group, request in zip(groups, requests, strict=True)}
            for answered in as_completed(asked):
                ((answer, *_), _), on_stop = answered.result(), asked[answered].on_stop
                if on_stop and answer.stopped:
                    on_stop(answer.ids)
            engine.compare_groups(groups, self.version)
            return tuple(row for group in groups for row in engine.rows(group))

    def part(self, parents: Mapping[tuple[str, int], tuple[str, int]]) -> None:
        """Do nothing: the servers recognise shared prefixes by their tokens."""
