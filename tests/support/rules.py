"""Static rules: one test per rule, which lists every violation instead of being one test per file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def violations(check: Callable[[Any], Iterable[str] | None], thing: Any) -> Iterator[str]:
    """Yield what `check` yields about a thing, or the error that it raises."""
    try:
        yield from check(thing) or ()
    except AssertionError as error:
        yield str(error).partition("\n")[0]
    except Exception as error:
        yield f"{type(error).__name__}: {error}"


def rule(things: Iterable[Any], name: Callable[[Any], str] = str) -> Callable[[Callable], Callable[[], None]]:
    """Make one test of a check of one thing. Checks yield violations that say what to do, or assert."""
    things = list(things)

    def decorate(check: Callable[[Any], Iterable[str] | None]) -> Callable[[], None]:
        def test() -> None:
            assert things, "nothing to check: the list of files or pieces is empty"
            found = [f"{name(thing)}: {what}" for thing in things for what in violations(check, thing)]
            assert not found, f"{len(found)} violations\n" + "\n".join(found)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        test.check = check  # so that a test can show the rule a violation
        return test

    return decorate


def piece_name(entry: Any) -> str:
    """Name a registered piece as a message does."""
    return f"{entry.kind} {entry.full_name} ({entry.target.__module__})"
