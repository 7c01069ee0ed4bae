"""The YAML of recipes, read so that every value knows the place that wrote it.

`read_recipe` lays a file over its parents (`extends`) and `--set` settings over the file, and checks no value: what
the keys mean is plankiln.recipe's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import yaml

from plankiln.errors import Problem, RecipeError
from plankiln.target import did_you_mean

_MAX_BYTES = 256 << 10
_MAX_DEPTH = 32
_MAX_VALUES = 10_000

_Value: TypeAlias = "bool | int | str | list[Node] | dict[str, Node] | None"


@dataclass
class Node:
    """A value, the place that wrote it (`file:line` or `--set …`) and the directory its paths start from."""

    value: _Value
    where: str
    folder: Path

    def get(self, key: str | int) -> Node | None:
        if isinstance(self.value, dict) and isinstance(key, str):
            return self.value.get(key)
        if isinstance(self.value, list) and isinstance(key, int) and key < len(self.value):
            return self.value[key]
        return None

    def nearest(self, path: Sequence[str | int]) -> Node:
        """The node at the end of `path`, or the last one on the way that exists."""
        node = self
        for part in path:
            node = node.get(part) or node
        return node

    def plain(self) -> Any:
        """The bare value; lists become tuples, as the strict schema wants them."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return tuple(node.plain() for node in self.value)
        return self.value


def merge(under: Node | None, over: Node | None) -> Node | None:
    """`over` laid on `under`: mappings merge key by key, everything else is replaced whole."""
    if under is None or over is None:
        return over or under
    if not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    keys = {**under.value, **over.value}
    merged = {key: merge(under.value.get(key), over.value.get(key)) for key in keys}
    return Node({key: node for key, node in merged.items() if node}, over.where, over.folder)


def _settle_digest(layer: Node) -> None:
    """A file, or the settings, that name a `source` and no `sha256` drop the digest of the source they replace."""
    model = layer.get("model")
    if model and isinstance(model.value, dict) and (source := model.get("source")):
        model.value.setdefault("sha256", Node(None, source.where, source.folder))


class _Loader(yaml.SafeLoader):
    """Composes nodes only. Plain scalars follow YAML 1.2 (`no` and `016` are text), and there are no floats."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own attribute)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.depth == _MAX_DEPTH:
            mark = cast(Any, self).peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {_MAX_DEPTH} levels", problem_mark=mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,999})")
_loader: Any = _Loader  # types-PyYAML leaves add_implicit_resolver untyped
_loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"^{_INT.pattern}$"), "-+0123456789")


@dataclass
class _Reader:
    """Turns files and overrides into nodes and collects problems. `incomplete`: the result lacks a file or a value."""

    problems: list[Problem] = field(default_factory=list)
    incomplete: bool = False
    _files: dict[str, Node] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _left: int = 0

    def fault(self, what: str, where: str, hint: str = "") -> None:
        self.problems.append(Problem(what, where, hint))

    def file(self, path: Path, named_at: str = "") -> Node | None:
        """The merged node of a file and its parents. `named_at` is the place of the `extends` that asked for it."""
        try:
            return self._load(path, named_at)
        except RecipeError as error:
            self.problems.extend(error.problems)
            self.incomplete = True
            return None

    def _load(self, path: Path, named_at: str) -> Node:
        try:
            identity = os.path.realpath(path)
        except ValueError:
            raise RecipeError(f"impossible path {show(str(path))}", named_at, "check the path") from None
        if identity in self._open:
            chain = " → ".join(os.path.basename(name) for name in [*self._open, identity])
            raise RecipeError(f"`extends` goes round in a circle ({chain})", named_at, "remove one of the links")
        if len(self._open) == _MAX_DEPTH:
            raise RecipeError(f"`extends` is deeper than {_MAX_DEPTH} files", named_at, "merge some of the files")
        if identity not in self._files:
            file = clean(str(path))
            node = self.text(_read_text(path, named_at), lambda line: f"{file}:{line + 1}", path.parent)
            self._open.append(identity)
            try:
                self._files[identity] = self._extend(node)
            finally:
                self._open.pop()
        return self._files[identity]

    def _extend(self, node: Node) -> Node:
        """Lay `node` over its parents, the last of them strongest. A parent's `name` is its own."""
        if not isinstance(node.value, dict):
            raise RecipeError(f"a recipe is a mapping, not {show(node.plain())}", node.where, _FIRST_LINE)
        parents = node.value.pop("extends", None)
        _settle_digest(node)
        if parents is None:
            return node
        base: Node | None = None
        for link in parents.value if isinstance(parents.value, list) else [parents]:
            if not isinstance(link.value, str) or not link.value or Path(link.value).is_absolute():
                hint = "write a path relative to this file, or a list of them"
                self.fault(f"`extends` cannot be {show(link.plain())}", link.where, hint)
                self.incomplete = True
            elif (parent := self.file(link.folder / link.value, link.where)) and isinstance(parent.value, dict):
                nameless = {key: value for key, value in parent.value.items() if key != "name"}
                base = merge(base, Node(nameless, parent.where, parent.folder))
        return merge(base, node) or node

    def text(self, text: str, place: Callable[[int], str], folder: Path) -> Node:
        """One YAML document as a node. `place` names a line, counted from 0."""
        try:
            root = yaml.compose(text, Loader=_Loader)
        except yaml.reader.ReaderError as error:
            what = f"character {show(chr(error.character))} is not allowed in YAML"
            raise RecipeError(what, place(text.count("\n", 0, error.position)), "remove it") from None
        except yaml.MarkedYAMLError as error:
            problem = error.problem or "syntax error"
            if error.context and problem.startswith("but "):
                problem = f"{error.context} {problem}"
            mark = error.problem_mark or error.context_mark
            hint = "check indentation (spaces, no tabs), colons and quotes, here and on the line above"
            raise RecipeError(f"not valid YAML: {clean(problem)}", place(mark.line if mark else 0), hint) from None
        except (ValueError, OverflowError):
            what = "not valid YAML: an escape or a directive holds an impossible number"
            hint = "look for `\\U…` in double quotes and for lines that start with `%`"
            raise RecipeError(what, place(0), hint) from None
        if root is None:
            raise RecipeError("the file is empty", place(0), _FIRST_LINE)
        self._left = _MAX_VALUES
        node = self._convert(root, place, place(root.start_mark.line), folder, 0)
        if self._left < 0:
            what = f"more than {_MAX_VALUES} values or {_MAX_DEPTH} levels once aliases are expanded"
            raise RecipeError(what, node.where, "write values instead of aliases (`*name`), or split the file")
        return node

    def _convert(self, node: yaml.Node, place: Callable[[int], str], where: str, folder: Path, depth: int) -> Node:
        self._left -= 1
        if self._left < 0:
            return Node(None, where, folder)
        if depth > _MAX_DEPTH:
            self._left = -1
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        value: _Value = None
        if isinstance(node, yaml.MappingNode) and tag == "map":
            value = {}
            for key_node, value_node in node.value:
                key, here = key_node.value, place(key_node.start_mark.line)
                if not isinstance(key, str):
                    self.fault("a key must be plain text", here, "remove the brackets around the key")
                elif key in value:
                    first = value[key].where.rpartition(":")[2]
                    self.fault(f"key {show(key)} is written twice", here, f"line {first} has the first one: keep one")
                else:
                    value[key] = self._convert(value_node, place, here, folder, depth + 1)
        elif isinstance(node, yaml.SequenceNode) and tag == "seq":
            items: list[yaml.Node] = node.value
            value = [self._convert(item, place, place(item.start_mark.line), folder, depth + 1) for item in items]
        elif isinstance(node, yaml.ScalarNode) and tag in ("null", "str", "bool"):
            value = {"null": None, "str": node.value, "bool": node.value.lower() == "true"}[tag]
        elif isinstance(node, yaml.ScalarNode) and tag == "int" and _INT.fullmatch(node.value):
            value = int(node.value)
        else:
            self.fault(f"tag {show(node.tag)} is not supported here", where, "write the plain value")
            self.incomplete = True
        return Node(value, where, folder)

    def settings(self, settings: Sequence[str]) -> Node | None:
        """`KEY.KEY=VALUE` settings as one node; their order matters only where they name the same key."""
        merged: Node | None = None
        for setting in settings:
            try:
                merged = merge(merged, self._setting(setting, f"--set {clean(setting)}"))
            except RecipeError as error:
                self.problems.extend(error.problems)
        if merged:
            _settle_digest(merged)
        return merged

    def _setting(self, setting: str, where: str) -> Node:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            hint = "write `--set KEY=VALUE`, such as `--set engine.tensor_parallel=2`"
            raise RecipeError("not a setting", where, hint)
        if keys[0] == "extends":
            raise RecipeError("`extends` can only be written in a file", where, "set the single keys instead")
        node = self.text(text or "null", lambda _: where, Path())
        for key in reversed(keys):
            node = Node({key: node}, where, Path())
        return node


_FIRST_LINE = "start with `name: NAME` and `model:`; recipes/smollm2-135m.yaml is an example"


def _read_text(path: Path, named_at: str) -> str:
    where = named_at or clean(str(path))
    shown = show(str(path))
    try:
        if not path.is_file():
            siblings = sorted(entry.name for entry in path.parent.glob("*.yaml"))[:50] if path.parent.is_dir() else []
            hint = did_you_mean(path.name, siblings) if siblings else "check the path"
            what = "is a directory" if path.is_dir() else "does not exist" if not path.exists() else "is not a file"
            raise RecipeError(f"recipe {shown} {what}", named_at, hint)
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise RecipeError(f"larger than a recipe can be ({_MAX_BYTES >> 10} KiB)", where, "is this a recipe?")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = "not UTF-8 text"
        raise RecipeError(what, f"{clean(str(path))}:{line}", "save the recipe as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        hint = "check its permissions" if isinstance(error, PermissionError) else "check the path"
        raise RecipeError(f"cannot read {shown} ({reason or 'impossible path'})", named_at, hint) from None


def read_recipe(path: Path, settings: Sequence[str]) -> tuple[Node, Node | None, list[Problem]]:
    """The recipe with its parents and `settings` merged, the settings alone, and the faults that leave it whole.

    settings: `KEY=VALUE` with dotted keys and YAML values. Raises RecipeError, with every fault found, when a file
    or a value is missing from the result.
    """
    reader = _Reader()
    from_file, from_settings = reader.file(path), reader.settings(settings)
    root = merge(from_file, from_settings)
    if reader.incomplete or root is None:
        raise RecipeError(reader.problems)
    return root, from_settings, reader.problems


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Each problem once, by file and line."""

    def place(problem: Problem) -> tuple[str, int]:
        file, _, line = problem.where.rpartition(":")
        return (file, int(line)) if line.isdecimal() else (problem.where, 0)

    return sorted(dict.fromkeys(problems), key=place)


def clean(text: str, limit: int = 100) -> str:
    """`text` on one line, without characters a terminal would act on."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return shown if len(text) <= limit else shown[:limit] + "…"


def show(value: object) -> str:
    """A value as it would be called in a sentence."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{clean(str(value), 60)}`" if value != "" else '`""`'
