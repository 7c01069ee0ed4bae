"""The stages of a build, in order, and nothing else: each is one call into the file that does it.

recipe → checkpoint → decoder spec → validated tensors, once; then for each target: graph → passes → plan → bundle.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Protocol, cast, get_args

from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.compiler.cpu.compile import CpuPlan, compile_cpu
from plankiln.compiler.export import export_decoder
from plankiln.compiler.families import DecoderSpec, decoder_spec
from plankiln.compiler.package import Contents, publish, staging
from plankiln.compiler.passes import apply_passes
from plankiln.errors import BuildError, Problem
from plankiln.manifest import Formats, ModelShape, PlanLimits, Source, TargetNeeds
from plankiln.recipe import ResolvedTarget, load_recipe

_Float = Literal["fp32", "bf16"]


class Progress(Protocol):
    """Is told what a build is doing."""

    def stage(self, name: str, target: str) -> None:
        """A stage begins; `target` is empty for a stage that all targets share."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` units of the present stage's work are done; the total is 0 when unknown."""


@dataclass(frozen=True)
class BuildResult:
    """One published bundle. `existed`: the same content lay there already. `seconds`: time of each stage."""

    recipe: str
    target: str
    path: Path
    digest: str
    existed: bool
    seconds: dict[str, float]


def build(
    recipe: Path,
    *,
    overrides: Sequence[str] = (),
    out: Path,
    progress: Progress,
    only_targets: Sequence[str] = (),
) -> list[BuildResult]:
    """Build a recipe's targets (all, or those named) and publish OUT/RECIPE/TARGET/DIGEST for each, in order.

    overrides: `KEY=VALUE` as for `--set`. Raises PlankilnError: RecipeError and BuildError before any work when
    the recipe or a target cannot be built, and the stages' own later. A target that fails publishes nothing.
    """
    clock = _Clock(progress)
    with clock.stage("recipe"):
        targets = _choose(load_recipe(recipe, overrides).resolve(), only_targets)
    model = targets[0].model
    with clock.stage("checkpoint"):
        opened = open_checkpoint(model.source, base=model.source_base, sha256=model.sha256, progress=progress)
    with opened as checkpoint:
        with clock.stage("spec"):
            spec = decoder_spec(checkpoint.config)
        with clock.stage("tensors"):
            checkpoint.validate(spec.expected_tensors())
        return [_build_target(target, checkpoint, spec, out, clock.fork(target.target.name)) for target in targets]


def _build_target(
    resolved: ResolvedTarget, checkpoint: Checkpoint, spec: DecoderSpec, out: Path, clock: _Clock
) -> BuildResult:
    name = resolved.target.name
    engine = resolved.engine
    with clock.stage("export"):
        graph = export_decoder(
            spec,
            checkpoint,
            weights=cast(_Float, resolved.quantize.weights),
            kv_cache=cast(_Float, resolved.quantize.kv_cache),
            max_context=engine.max_context,
            block_size=engine.block_size,
        )
    with clock.stage("passes"):
        graph = apply_passes(graph)
    with staging(out / resolved.recipe / name) as staged:
        rank = staged / "rank0"
        rank.mkdir()
        with clock.stage("compile"):
            plan = compile_cpu(graph, resolved.target, rank, resolved.recipe, clock.progress)
        with clock.stage("package"):
            done = publish(staged, _contents(resolved, checkpoint, spec, plan, clock))
    return BuildResult(resolved.recipe, name, done.path, done.digest, done.existed, clock.seconds)


def _contents(
    resolved: ResolvedTarget, checkpoint: Checkpoint, spec: DecoderSpec, plan: CpuPlan, clock: _Clock
) -> Contents:
    special = dict(checkpoint.special_tokens)
    return Contents(
        name=resolved.recipe,
        recipe=resolved.model_dump(mode="json"),
        source=Source(uri=resolved.model.source, digest=checkpoint.digest),
        target=TargetNeeds(
            name=resolved.target.name,
            kind="cpu",
            isa=resolved.target.isa,
            machine=platform.machine(),
            flags=plan.flags,
            glibc=plan.glibc,
        ),
        model=ModelShape(
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            layers=spec.layers,
            hidden=spec.hidden_size,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            max_context=spec.max_position,
        ),
        formats=Formats(weights=plan.weights, activations=plan.activations, kv_cache=plan.kv_cache),
        bytes_per_format=plan.bytes_per_format,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        limits=_limits(resolved),
        eos_token_ids=checkpoint.eos_token_ids,
        add_bos=bool(special.pop("add_bos_token", False)),
        special_tokens=special,
        tokenizer_json=checkpoint.tokenizer_json,
        chat_template=checkpoint.chat_template,
        tools={"compiler": plan.compiler, **{name: version(name) for name in ("numpy", "onnx", "onnx-ir")}},
        report={"target": resolved.target.name, "seconds": clock.seconds},
    )


def _limits(resolved: ResolvedTarget) -> PlanLimits:
    engine = resolved.engine
    return PlanLimits(
        max_sequences=engine.max_sequences,
        max_tokens_per_step=engine.max_tokens_per_step,
        max_context=engine.max_context,
        block_size=engine.block_size,
        max_logit_rows=engine.max_logit_rows,
        kv_memory=engine.kv_memory,
    )


def _choose(targets: tuple[ResolvedTarget, ...], wanted: Sequence[str]) -> list[ResolvedTarget]:
    """The targets to build. Raises BuildError when one of them cannot be built here, and says which can."""
    names = [target.target.name for target in targets]
    listed = ", ".join(f"`{name}`" for name in names)
    if unknown := [name for name in wanted if name not in names]:
        raise BuildError([Problem(f"the recipe has no target `{name}`", hint=f"it has {listed}") for name in unknown])
    chosen = [target for target in targets if not wanted or target.target.name in wanted]
    reasons = {target.target.name: _obstacle(target) for target in targets}
    buildable = [f"`--target {name}`" for name in names if reasons[name] is None]
    hint = f"of this recipe's targets, {' or '.join(buildable)} can be built here" if buildable else ""
    if problems := [
        Problem(f"cannot build target `{target.target.name}`", str(reason), hint or _NO_TARGET)
        for target in chosen
        if (reason := reasons[target.target.name])
    ]:
        raise BuildError(problems)
    return chosen


_NO_TARGET = (
    "none of this recipe's targets can be built here; "
    "try `--set targets=[cpu-native] --set quantize.weights=bf16 --set quantize.kv_cache=bf16`"
)


def _obstacle(resolved: ResolvedTarget) -> str | None:
    """Why this version cannot build the target, or None."""
    target = resolved.target
    if target.kind != "cpu":
        return "GPU targets are not built yet"
    if target.flags and platform.machine().lower() not in ("x86_64", "amd64"):
        return f"it is for x86-64, and this machine is `{platform.machine()}`"
    for key, value in (("weights", resolved.quantize.weights), ("kv_cache", resolved.quantize.kv_cache)):
        if value not in get_args(_Float):
            return f"`quantize.{key}: {value}` is not built yet, only {' and '.join(get_args(_Float))} are"
    if resolved.engine.block_size % 16:
        return f"`engine.block_size: {resolved.engine.block_size}`: a CPU plan needs a multiple of 16 tokens"
    if resolved.engine.tensor_parallel > 1:
        return "`engine.tensor_parallel` above 1 is not built yet"
    return None


@dataclass
class _Clock:
    """Tells the progress what begins and keeps how long it took, in seconds."""

    progress: Progress
    target: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def fork(self, target: str) -> _Clock:
        """A clock for one target, which has had the shared stages already."""
        return _Clock(self.progress, target, dict(self.seconds))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name, self.target)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 4)
