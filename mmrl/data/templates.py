"""Plain-text templates of jinja2, filled with the fields of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import SandboxedEnvironment

from mmrl.config.loading import ConfigError
from mmrl.data.fields import RowError, short

# Control marks of chat templates, processors and judges: <|im_end|>, <image>, <score>, [INST].
MARKUP = re.compile(r"<(?=[|\N{FULLWIDTH VERTICAL LINE}]|/?[A-Za-z_][\w-]*>)|\[(?=/?[A-Z_]+\])")


def quoted(text: str) -> str:
    """Escape control marks in a model's text before a prompt quotes it: `<image>` becomes `< image>`."""
    return MARKUP.sub(lambda match: match[0] + " ", text)


class TextTemplate:
    """A sandboxed template of jinja2 for plain text, without HTML escaping.

    Args:
        source: The template.
        known: Names that the template may use.
        needed: Names that the template must use.
        place: Owner of the template, for errors.

    Raises:
        ConfigError: Bad syntax, an unknown name, or a missing name of `needed`.
    """

    def __init__(self, source: str, known: Set[str], needed: Set[str], place: str) -> None:
        environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        try:
            names = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{place}: line {error.lineno} of the template: {error.message}") from error
        for name in sorted(names - known):
            raise ConfigError(f"{place}: the template reads '{name}'; there are {', '.join(sorted(known))}")
        for name in sorted(needed - names):
            raise ConfigError(f"{place}: the template does not read '{name}', which it has to show")

    def __call__(self, words: Mapping[str, Any]) -> str:
        """Fill the template; raises `RowError` if a name that it uses is missing."""
        try:
            return self._template.render(words)
        except TemplateError as error:
            raise RowError(f"a template cannot be filled with {short(dict(words))}: {error}") from error
