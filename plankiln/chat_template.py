"""Chat templates: a model's own Jinja program, run in a sandbox with the names that transformers gives it."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plankiln.errors import BundleError, RequestError

MAX_RENDERED = 16 << 20  # characters


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, for training: here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Unfolded(CodeGenerator):
    """Computes nothing at compile time, where no sandbox watches; jinja's `optimized=False` still would for outputs."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if isinstance(node, nodes.TemplateData):
            return super()._output_child_to_const(node, frame, finalize)
        raise nodes.Impossible


class _Sandbox(ImmutableSandboxedEnvironment):
    """Lets no single operation make a value that is larger than any prompt."""

    code_generator_class = _Unfolded
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if max(_size(left, operator, right), _size(right, operator, left)) > MAX_RENDERED:
            _refuse(f"`{operator}` makes a value that is too large")
        return super().call_binop(context, operator, left, right)


def _size(value: Any, operation: str, count: Any) -> int:
    """About how large `value * count` or `value ** count` is: items, or bits of a number."""
    if not isinstance(count, int):
        return 0
    if isinstance(value, int):
        return value.bit_length() * abs(count) if operation == "**" else value.bit_length() + count.bit_length()
    return operator.length_hint(value) * count


class ChatTemplate:
    """A chat template, compiled on first use: it is a program, and who renders nothing need not trust it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    def compile(self) -> None:
        """Raises BundleError, with the reason, when the source is not Jinja."""
        _ = self._template

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = _Sandbox(
            optimized=False,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(self._special_tokens, raise_exception=_refuse, strftime_now=_strftime_now)
        try:
            return environment.from_string(self._source)
        except Exception as error:  # Jinja's own, and Python's for what Jinja makes of it: too deep, too long a number
            line = getattr(error, "lineno", None) if isinstance(error, jinja2.TemplateSyntaxError) else None
            where = f"chat template, line {line}" if line else "chat template"
            raise BundleError(f"not a Jinja template ({str(error) or type(error).__name__})", where) from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The conversation as one text. Raises RequestError when the messages are no messages or are refused, and
        BundleError as `compile`."""
        if isinstance(messages, (str, bytes, Mapping)) or not messages:
            raise RequestError("a conversation must be a list of at least one message")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError("not a message", f"messages[{number}]", 'write {"role": "user", "content": "…"}')
        template, parts, room = self._template, list[str](), MAX_RENDERED
        try:
            for part in template.generate({"tools": None, "documents": None} | variables, messages=list(messages)):
                parts.append(part)
                room -= len(part)
                if room < 0:
                    _refuse(f"the text is longer than {MAX_RENDERED} characters")
            return "".join(parts)
        except Exception as error:  # a template is a program: it can fail in any way
            raise RequestError(f"the model's chat template refused the messages ({error})") from None
