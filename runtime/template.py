"""Chat templates: a model's own Jinja program, run in a sandbox with the names that transformers gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plankiln.errors import BundleError, RequestError


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, for training: here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled chat template. Raises BundleError when `source` is not Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(special_tokens, raise_exception=_refuse, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            where = f"chat template, line {error.lineno}"
            raise BundleError(f"not a Jinja template ({error.message})", where) from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The conversation as one text. Raises RequestError when the messages are no messages or are refused."""
        if isinstance(messages, (str, bytes, Mapping)) or not messages:
            raise RequestError("a conversation must be a list of at least one message")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError("not a message", f"messages[{number}]", 'write {"role": "user", "content": "…"}')
        try:
            return self._template.render({"tools": None, "documents": None} | variables, messages=list(messages))
        except Exception as error:  # a template is a program: it can fail in any way
            raise RequestError(f"the model's chat template refused the messages ({error})") from None
