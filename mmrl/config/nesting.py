"""Checks that wrappers fit the pieces that they wrap, and that servers can serve the policy."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from mmrl.config.binding import Bound
from mmrl.config.loading import ConfigError
from mmrl.config.registry import Entry, find
from mmrl.config.registry import pieces as known
from mmrl.config.schema import Piece, as_piece

OF_SERVERS = ("sleep_level", "video_pruning_rate")  # options that apply to all requests of a server


def check_nesting(listed: Sequence[Bound], place: str, first: str, wrapped: str) -> None:
    """Raise `ConfigError` if the first of `listed` is a wrapper, or if a later one is not."""
    for i, bound in enumerate(listed):
        takes = next(iter(inspect.signature(bound.entry.target).parameters), "")
        if i == 0 and takes == wrapped:
            raise ConfigError(
                f"{place}[0]: '{bound.entry.full_name}' wraps another {wrapped}; name that one before it"
            )
        if i > 0 and takes == first:
            raise ConfigError(
                f"{place}[{i}]: '{bound.entry.full_name}' wraps no other {wrapped}; name it first"
            )
        if i > 0:
            _check_parts(bound, listed[:i], f"{place}[{i}]", wrapped)


def _check_parts(bound: Bound, before: Sequence[Bound], place: str, wrapped: str) -> None:
    """Raise `ConfigError` if a wrapper requires methods that the piece it wraps lacks."""
    needs, first, inner = bound.entry.hints.get(wrapped), before[0].entry, before[-1].entry
    copies = getattr(bound.entry.target, "copies_engine", None)
    if copies and copies(bound.options) and getattr(first.target, "answers_elsewhere", False):
        raise ConfigError(
            f"{place}: '{bound.entry.full_name}' answers with another `policy` too, and the servers of "
            f"'{first.full_name}' hold one; use 'vision.generate'"
        )
    if not inspect.isclass(needs):
        return
    begin, instead = f"{place}: '{bound.entry.full_name}'", getattr(bound.entry.target, "instead", "")
    advice = f", not '{inner.full_name}'" + (f"; {instead}" if instead else "")
    if getattr(needs, "_is_protocol", False):  # any piece with the protocol's methods fits
        if not _has_methods(inner, needs):
            able = sorted(entry.full_name for entry in known(wrapped) if _has_methods(entry, needs))
            raise ConfigError(f"{begin} wraps {' or '.join(map(repr, able))}{advice}")
    elif getattr(first.target, "answers_elsewhere", False):
        why = getattr(bound.entry.target, "in_process", "decodes with the model itself")
        elsewhere = f"'{first.full_name}' answers elsewhere; use 'vision.generate'"
        raise ConfigError(f"{begin} {why}, and {elsewhere}")
    # Refuse only pieces known to lack the methods: wrappers, and engines that declare `makes`. Any other
    # innermost piece may have them, although it is no subclass of `needs`.
    elif (
        (inner is not first or hasattr(inner.target, "makes"))
        and inspect.isclass(inner.target)
        and not issubclass(inner.target, needs)
    ):
        wanted = next((e.full_name for e in known(wrapped) if e.target is needs), needs.__name__)
        raise ConfigError(f"{begin} wraps '{wanted}' alone{advice}")


def _has_methods(entry: Entry, protocol: type) -> bool:
    """Whether the class of a piece has all methods of a protocol; functions always pass."""
    methods = [name for name, member in vars(protocol).items() if inspect.isfunction(member)]
    public = [name for name in methods if not name.startswith("_")]
    return not inspect.isclass(entry.target) or all(hasattr(entry.target, name) for name in public)


def engines_with_policies(config: Any) -> Iterator[tuple[str, Piece, Piece]]:
    """Yield (dotted path, engine, policy) of every engine in a training run or an evaluation.

    Rewards that ask a model, such as judges, have their own engine and policy.
    """
    for section in ("rollout", "evaluation"):
        for i, engine in enumerate(getattr(getattr(config, section, None), "engine", ())):
            yield f"{section}.engine[{i}]", engine, config.policy
    for place, rewards in (("", getattr(config, "rewards", ())), ("evaluation.", config.evaluation.rewards)):
        for i, reward in enumerate(rewards):
            own = {name: reward.options.get(name) for name in ("engine", "policy")}
            if all(own.values()):
                at = f"{place}rewards[{i}].engine"
                yield at, as_piece(own["engine"], at), as_piece(own["policy"], at)


def check_servers(config: Any) -> None:
    """Raise `ConfigError` if servers cannot serve their policy, or engines disagree on a server's options."""
    served: dict[str, tuple[str, Piece, Piece]] = {}
    for place, engine, policy in engines_with_policies(config):
        if not (check := getattr(find("engine", engine.name).target, "check_policy", None)):
            continue
        try:
            check(policy.options)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error
        for url in engine.options.get("servers", ()):
            first, other, earlier = served.setdefault(url, (place, policy, engine))
            both = f"{place} and {first} ask the server {url}, but with different"
            if other != policy:
                raise ConfigError(f"{both} policies; a server holds the weights of one")
            for name in OF_SERVERS:
                if (earlier.options.get(name) or 0) != (engine.options.get(name) or 0):
                    raise ConfigError(f"{both} values of `{name}`, which it has once; set it in both")
