"""Typed access to a model's config that gathers every problem and knows which keys nobody has read."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from plankiln.errors import Problem

T = TypeVar("T")
_SHOWN = 60


def shown(value: object) -> str:
    """`value` as an error message quotes it: a string bare, anything else as JSON, cut to a readable length."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):  # more digits, or deeper nesting, than Python prints
        return "`…`"
    return f"`{text}`" if len(text) <= _SHOWN else f"`{text[:_SHOWN]}…`"


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint naming the nearest known word, or `otherwise`."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"did you mean `{near[0]}`?" if near else otherwise


class ConfigReader:
    """Reads one JSON object. A wrong value is noted and replaced by a harmless one, so that reading goes on.

    path: where the object sits, for messages ("config.json" or "config.json: rope_scaling").
    """

    def __init__(self, values: Mapping[str, Any], path: str, problems: list[Problem]) -> None:
        self.path = path
        self.problems = problems
        self._values = values
        self._read: set[str] = set()

    def complain(self, what: str, hint: str = "") -> None:
        """Note a problem with this object."""
        self.problems.append(Problem(what, self.path, hint))

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null; does not count as reading it."""
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:
        """The value of `key` unchecked, None when absent or null."""
        self._read.add(key)
        return self._values.get(key)

    def present(self, key: str) -> bool:
        """Whether `key` is there, null included."""
        return key in self._values

    def integer(self, key: str, default: int, *, low: int = 1, high: int) -> int:
        """A whole number in low … high; absent or null gives `default`."""
        found = self.optional_integer(key, None, low=low, high=high)
        return default if found is None else found

    def optional_integer(self, key: str, default: int | None, *, low: int = 1, high: int) -> int | None:
        """A whole number in low … high; absent or null gives `default`, which may be None."""
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.complain(f"`{key}` must be a whole number, not {shown(value)}")
        elif not low <= value <= high:
            self.complain(f"`{key}` must lie between {low} and {high}, not {shown(value)}")
        else:
            return value
        return default

    def required(self, key: str, *, low: int = 1, high: int) -> int:
        """A whole number that must be there."""
        if not self.has(key):
            self._read.add(key)
            self.complain(f"`{key}` is missing")
            return low
        return self.integer(key, low, low=low, high=high)

    def number(self, key: str, default: T, *, low: float, high: float) -> float | T:
        """A finite number in low … high; absent or null gives `default`."""
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.complain(f"`{key}` must be a number, not {shown(value)}")
        elif isinstance(value, float) and not math.isfinite(value):
            self.complain(f"`{key}` must be finite, not {shown(value)}")
        elif not low <= value <= high:
            self.complain(f"`{key}` must lie between {low:g} and {high:g}, not {shown(value)}")
        else:
            return float(value)
        return default

    def flag(self, key: str, default: bool) -> bool:
        """true or false; absent or null gives `default`."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.complain(f"`{key}` must be true or false, not {shown(value)}")
            return default
        return value

    def text(self, key: str, default: str) -> str:
        """A string; absent or null gives `default`."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.complain(f"`{key}` must be a string, not {shown(value)}")
            return default
        return value

    def table(self, key: str) -> ConfigReader | None:
        """A nested object, None when absent, null or empty."""
        value = self.raw(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            self.complain(f"`{key}` must be an object, not {shown(value)}")
            return None
        return ConfigReader(value, f"{self.path}: {key}", self.problems)

    def ignore(self, keys: Iterable[str]) -> None:
        """Keys that change nothing in the graph."""
        self._read.update(keys)

    def fixed(self, key: str, allowed: object, hint: str) -> None:
        """A key whose only supported value is `allowed` (or null)."""
        value = self.raw(key)
        if value is not None and (value != allowed or isinstance(value, bool) != isinstance(allowed, bool)):
            self.complain(f"`{key}` {shown(value)} is not supported", hint)

    def ignore_rest(self) -> None:
        """Nothing more is said of this object's keys."""
        self._read.update(self._values)

    def finish(self, known: Iterable[str] = ()) -> None:
        """Note every key that nobody has read; `known` are further words a typo may have meant."""
        words = (self._read | set(known)) - set(self._values)
        for key in self._values:
            if key not in self._read:
                hint = did_you_mean(key, words, "its meaning is not known, so it cannot be honoured")
                self.complain(f"unknown key `{key[:_SHOWN]}`", hint)
