"""The stages of a build, in order, and nothing else: each is one call into the file that does it.

recipe → checkpoint; for each target whose bundle is not there already: decoder spec → validated tensors (both once) →
graph → passes → program → code and weights, each from the store when nothing it depends on has changed → bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.compiler.atomic import link_or_copy
from plankiln.compiler.checks import check_model, choose_targets, config_place
from plankiln.compiler.cpu.compile import CpuSource, compile_code, describe_plan, lower_cpu, pack_weights
from plankiln.compiler.cpu.toolchain import Compiler, find_compiler
from plankiln.compiler.describe import describe, texts_of
from plankiln.compiler.estimate import Estimate, estimate, same_disk
from plankiln.compiler.export import export_decoder
from plankiln.compiler.families import DecoderSpec, decoder_spec
from plankiln.compiler.formats import Format
from plankiln.compiler.measure import Clock, Progress
from plankiln.compiler.package import Published, find_published, publish, staging
from plankiln.compiler.passes import apply_passes
from plankiln.compiler.precision import Precision, WeightChoice
from plankiln.compiler.stages import bundle_stage, code_stage, weights_stage, why
from plankiln.compiler.store import Entry, Stage, Store
from plankiln.compiler.store_care import collect, size_limit
from plankiln.errors import BuildError, PlankilnError, Problem
from plankiln.host import readable_size, store_directory
from plankiln.recipe import ResolvedTarget


@dataclass(frozen=True)
class BuildResult:
    """One published bundle. `existed`: the same content lay there already. `seconds`: time of each stage.

    `reused`: the stages that the store was asked for, and whether it had them.
    """

    recipe: str
    target: str
    path: Path
    digest: str
    existed: bool
    seconds: dict[str, float]
    reused: dict[str, bool] = field(default_factory=dict)


class IncompleteBuildError(BuildError):
    """Targets that failed, while the others were built (`--keep-going`): `results` are theirs."""

    def __init__(self, problems: Sequence[Problem], results: Sequence[BuildResult] = ()) -> None:
        super().__init__(problems)
        self.results = tuple(results)


def build(
    recipe: Path,
    *,
    overrides: Sequence[str] = (),
    out: Path,
    progress: Progress,
    only_targets: Sequence[str] = (),
    explain: bool = False,
    keep_going: bool = False,
) -> list[BuildResult]:
    """Build a recipe's targets (all, or those named) and publish OUT/RECIPE/TARGET/DIGEST for each, in order.

    overrides: `KEY=VALUE` as for `--set`. explain: note of each stage whether the store has it, and why not.
    keep_going: build the other targets when one fails, and raise IncompleteBuildError at the end. Raises PlankilnError:
    RecipeError and BuildError before any work when the recipe or a target cannot be built, and the stages' own later.
    A target that fails publishes nothing.
    """
    limit = size_limit()
    clock = Clock(progress)
    problems: list[Problem] = []
    with clock.stage("recipe"):
        targets = choose_targets(recipe, overrides, only_targets, refused=problems if keep_going else None)
    store = Store(store_directory(), progress.note)
    model = targets[0].model
    with clock.stage("checkpoint"):
        opened = open_checkpoint(model.source, base=model.source_base, sha256=model.sha256, progress=progress)
    results: list[BuildResult] = []
    with opened as checkpoint:
        shared = _Model(checkpoint, targets, clock)
        for target in targets:
            try:
                results.append(_TargetBuild(target, shared, out, store, explain).build())
            except PlankilnError as e:
                if not keep_going:
                    raise
                problems += e.problems
    try:
        collect(store, limit)
    except PlankilnError as e:
        progress.note(f"the store may be larger than its limit: {e.problems[0].what}")
    if problems:
        raise IncompleteBuildError(list(dict.fromkeys(problems)), results)
    return results


@dataclass
class _Model:
    """What all targets share."""

    checkpoint: Checkpoint
    targets: Sequence[ResolvedTarget]
    clock: Clock
    _spec: DecoderSpec | None = None

    def spec(self) -> DecoderSpec:
        """The model's spec, which the checkpoint's tensors agree with; made when the first target needs it."""
        if self._spec is None:
            with self.clock.stage("spec"):
                spec = decoder_spec(self.checkpoint.config, config_place(self.checkpoint))
                check_model(self.checkpoint, spec, self.targets)
            with self.clock.stage("tensors"):
                self.checkpoint.validate(spec.expected_tensors())
            self._spec = spec
        return self._spec


@dataclass
class _TargetBuild:
    """The build of one target."""

    resolved: ResolvedTarget
    model: _Model
    out: Path
    store: Store
    explain: bool
    reused: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.resolved.target.name
        self.clock = Clock(self.model.clock.progress, self.name)
        self.place = self.out / self.resolved.recipe / self.name

    def build(self) -> BuildResult:
        """Find the bundle or make it, while no other build does."""
        compiler = find_compiler()
        whole = bundle_stage(self.resolved, self.model.checkpoint.digest, compiler)
        with self.store.lock(whole):
            known = self.store.find(whole)
            digest = str(known.record.result["digest"]) if known else ""
            done = find_published(self.place, digest, self.store.root) if known else None
            self._explain(whole, done is not None, f"no sound bundle at `{self.place / digest}`" if known else "")
            if done is None:
                done, keys = self._make(compiler)
                made: dict[str, JsonValue] = {"digest": done.digest, "entries": [*keys]}
                if known is None or known.record.result != made:
                    self.store.add(whole, lambda _: made)
                self.store.pin(done.path, [whole.key, *keys])
        seconds = self.model.clock.seconds | self.clock.seconds
        return BuildResult(self.resolved.recipe, self.name, done.path, done.digest, done.existed, seconds, self.reused)

    def _make(self, compiler: Compiler) -> tuple[Published, list[str]]:
        """Publish the bundle; also the keys of the entries that it is made of."""
        source = self._lower(self.model.spec())
        code = code_stage(source, compiler)
        context = self.resolved.engine.max_context
        weights = weights_stage(source, self.model.checkpoint.digest, self.model.spec(), context)
        predicted = self._predict(source, code, weights)

        def compile_it(made: Path) -> dict[str, JsonValue]:
            glibc = compile_code(source, compiler, made)
            if code_stage(source, compiler).key != code.key:
                raise BuildError("the kernels' headers changed while they were compiled", hint="build again")
            return {"glibc": glibc}

        def pack_it(made: Path) -> dict[str, JsonValue]:
            pack_weights(source, made, self.clock.progress)
            return {}

        with (
            self._stage(code, compile_it) as compiled,
            self._stage(weights, pack_it) as packed,
            staging(self.place) as staged,
            self.clock.stage("package"),
        ):
            (staged / "rank0").mkdir()
            known = {}
            for entry in (compiled, packed):
                for name, described in entry.record.files.items():
                    link_or_copy(entry.path / name, staged / "rank0" / name)
                    known[f"rank0/{name}"] = described
            plan = describe_plan(source, compiler, str(compiled.record.result["glibc"]))
            description = describe(self.resolved, self.model.checkpoint, self.model.spec(), plan)
            texts = texts_of(self.model.checkpoint, self._report(predicted))
            return publish(staged, description, texts, known), [code.key, weights.key]

    def _lower(self, spec: DecoderSpec) -> CpuSource:
        with self.clock.stage("export"):
            graph = export_decoder(
                spec,
                self.model.checkpoint,
                weights=_precision(self.resolved),
                kv_cache=cast(Format, self.resolved.quantize.kv_cache),
                max_context=self.resolved.engine.max_context,
                block_size=self.resolved.engine.block_size,
            )
        with self.clock.stage("passes"):
            graph = apply_passes(graph)
        with self.clock.stage("lower"):
            return lower_cpu(graph, self.resolved.target, self.resolved.recipe)

    def _predict(self, source: CpuSource, code: Stage, weights: Stage) -> Estimate:
        """What is left to do will take this. Raises BuildError where the machine does not have it."""
        predicted = estimate(
            source.program,
            self.model.checkpoint.tensors,
            code=not self.store.has(code),
            weights=not self.store.has(weights),
            linked=same_disk(self.store.root, self.place),
        )
        if self.explain:
            self.clock.progress.note(
                f"{self.name}: predicted: memory {readable_size(predicted.packing)} to pack the weights, "
                f"{readable_size(predicted.compiler)} for the compiler; "
                f"disk {readable_size(predicted.store)} in the store, {readable_size(predicted.out)} in `{self.out}`"
            )
        predicted.check(self.store.root, self.place)
        return predicted

    @contextmanager
    def _stage(self, stage: Stage, work: Callable[[Path], dict[str, JsonValue]]) -> Iterator[Entry]:
        """The stage's entry, found or made; it stays for as long as it is used."""
        with self.store.lock(stage):
            with self.clock.stage(stage.name):
                found = self.store.find(stage)
                self._explain(stage, found is not None)
                entry = found or self.store.add(stage, work)
            yield entry

    def _explain(self, stage: Stage, hit: bool, reason: str = "") -> None:
        self.reused[stage.name] = hit
        if self.explain:
            answer = "hit" if hit else f"miss: {reason or why(self.store, stage)}"
            self.clock.progress.note(f"{self.name}: {stage.name} {stage.key[:12]}: {answer}")

    def _report(self, predicted: Estimate) -> dict[str, JsonValue]:
        return {
            "target": self.name,
            "seconds": {**self.model.clock.seconds, **self.clock.seconds},
            "peak_rss": {**self.model.clock.peak_rss, **self.clock.peak_rss},
            "compiler_peak_rss": self.clock.children_peak_rss(),
            "predicted": asdict(predicted),
            "reused": {**self.reused},
        }


def _precision(resolved: ResolvedTarget) -> Precision:
    quantize = resolved.quantize
    return Precision(
        cast(WeightChoice, quantize.weights),
        quantize.group_size or 32,
        bool(quantize.minimum),
        quantize.activations or "int8",
    )
