"""The stages of a build, in order, and nothing else: each is one call into the file that does it.

recipe → checkpoint; for each target whose bundle is not there already: decoder spec → validated tensors (both once) →
calibrated checkpoint or chosen formats, where the recipe asks → graph → passes → program → code and weights, each from
the store when nothing it depends on has changed → gate → bundle.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.compiler.atomic import link_or_copy
from plankiln.compiler.checks import check_measurable, check_model, choose_targets, config_place
from plankiln.compiler.cpu.compile import CpuSource, compile_code, describe_plan, lower_cpu, pack_weights
from plankiln.compiler.cpu.toolchain import Compiler, find_compiler
from plankiln.compiler.describe import describe, texts_of
from plankiln.compiler.estimate import Estimate, estimate, same_disk
from plankiln.compiler.export import export_decoder
from plankiln.compiler.families import DecoderSpec, decoder_spec
from plankiln.compiler.formats import KvFormat
from plankiln.compiler.gate import (
    GateResult,
    checkpoint_tokenizer,
    gate_record,
    held_out,
    judge,
    measure,
    open_plan,
    reject,
    skipped_gate,
)
from plankiln.compiler.groups import with_group
from plankiln.compiler.matrix_errors import matrix_errors
from plankiln.compiler.measure import Clock, Progress
from plankiln.compiler.package import Published, find_published, publish, staging
from plankiln.compiler.passes import apply_passes
from plankiln.compiler.passes.fold_prescale import explicit_prescales
from plankiln.compiler.prepare import Prepared, prepare
from plankiln.compiler.reference_plan import reference_plan
from plankiln.compiler.stages import bundle_stage, code_stage, weights_stage, why
from plankiln.compiler.store import Entry, Stage, Store
from plankiln.compiler.store_care import collect, size_limit
from plankiln.errors import BuildError, PlankilnError, Problem
from plankiln.host import readable_size, store_directory
from plankiln.manifest import GateRecord
from plankiln.quantize.calibrate import tools
from plankiln.quantize.datasets import texts
from plankiln.recipe import ResolvedTarget, Text


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
    gate: bool = True,
) -> list[BuildResult]:
    """Build a recipe's targets (all, or those named) and publish OUT/RECIPE/TARGET/DIGEST for each, in order.

    overrides: `KEY=VALUE` as for `--set`. explain: note of each stage whether the store has it, and why not.
    keep_going: build the other targets when one fails, and raise IncompleteBuildError at the end. gate: measure each
    plan and refuse one that loses more than the recipe allows. Raises PlankilnError: RecipeError and BuildError before
    any work when the recipe or a target cannot be built, and the stages' own later. A target that fails publishes
    nothing.
    """
    limit = size_limit()
    clock = Clock(progress)
    problems: list[Problem] = []
    with clock.stage("recipe"):
        refused = problems if keep_going else None
        targets = choose_targets(recipe, overrides, only_targets, refused=refused)
        if gate:
            targets = check_measurable(targets, refused)
    store = Store(store_directory(), progress.note)
    model = targets[0].model
    with clock.stage("checkpoint"):
        opened = open_checkpoint(model.source, base=model.source_base, sha256=model.sha256, progress=progress)
    results: list[BuildResult] = []
    with opened as checkpoint:
        shared = _Model(checkpoint, targets, clock)
        for target in targets:
            try:
                results.append(_TargetBuild(target, shared, out, store, explain, gate).build())
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
    gate: bool
    reused: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.resolved.target.name
        self.clock = Clock(self.model.clock.progress, self.name)
        self.place = self.out / self.resolved.recipe / self.name

    def build(self) -> BuildResult:
        """Find the bundle or make it, while no other build does."""
        compiler = find_compiler()
        whole = bundle_stage(self.resolved, self.model.checkpoint.digest, compiler, self._texts())
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

    def _texts(self) -> dict[str, str]:
        """Digests of the texts that the recipe only names, and whether the plan is measured."""
        found = {"gate": str(self.gate)}
        if self.gate:
            found["gate.text"] = texts(self.resolved.gate.text, "held_out").digest
        if self.resolved.quantize.is_calibrated or self.resolved.quantize.weights == "auto":
            found["calibration.text"] = texts(self.resolved.quantize.calibration or Text(), "calibration").digest
            found |= tools()
        return found

    def _make(self, compiler: Compiler) -> tuple[Published, list[str]]:
        """Publish the bundle; also the keys of the entries that it is made of."""
        with ExitStack() as stack:
            spec = self.model.spec()
            quantize = with_group(spec, self.resolved.quantize, self.resolved.engine.tensor_parallel)
            prepared = prepare(
                self.model.checkpoint, quantize, self.resolved.target, self._run, stack, self.clock.progress
            )
            if prepared.checkpoint is not self.model.checkpoint:
                prepared.checkpoint.validate(spec.expected_tensors())
            return self._make_from(prepared, compiler)

    def _make_from(self, prepared: Prepared, compiler: Compiler) -> tuple[Published, list[str]]:
        source, explicit = self._lower(prepared)
        code = code_stage(source, compiler)
        context = self.resolved.engine.max_context
        digests = dict.fromkeys((prepared.checkpoint.digest, self.model.checkpoint.digest))  # packed, compared with
        weights = weights_stage(source, "+".join(digests), self.model.spec(), context)
        predicted = self._predict(source, code, weights, prepared.checkpoint)

        def compile_it(made: Path) -> dict[str, JsonValue]:
            glibc = compile_code(source, compiler, made)
            if code_stage(source, compiler).key != code.key:
                raise BuildError("the kernels' headers changed while they were compiled", hint="build again")
            return {"glibc": glibc}

        def pack_it(made: Path) -> dict[str, JsonValue]:
            pack_weights(source, made, self.clock.progress)
            return {"matrices": matrix_errors(source.program, self.model.checkpoint, prepared.checkpoint)}

        with (
            self._stage(code, compile_it) as compiled,
            self._stage(weights, pack_it) as packed,
            staging(self.place) as staged,
        ):
            rank = staged / "rank0"
            rank.mkdir()
            known = {}
            for entry in (compiled, packed):
                for name, described in entry.record.files.items():
                    link_or_copy(entry.path / name, rank / name)
                    known[f"rank0/{name}"] = described
            report = self._report(predicted) | {"matrices": packed.record.result["matrices"], **prepared.report}
            record = self._measure(source, rank, (compiled, packed), report)
            with self.clock.stage("package"):
                plan = describe_plan(source, compiler, str(compiled.record.result["glibc"]))
                quantization = prepared.record and prepared.record.model_copy(update={"prescale_multiplies": explicit})
                description = describe(self.resolved, self.model.checkpoint, self.model.spec(), plan)
                description = description.model_copy(update={"gate": record, "quantization": quantization})
                published = publish(staged, description, texts_of(self.model.checkpoint, report), known)
        return published, [*prepared.keys, code.key, weights.key]

    def _run(self, stage: Stage, work: Callable[[Path], dict[str, JsonValue]]) -> Entry:
        with self._stage(stage, work) as entry:
            return entry

    def _lower(self, prepared: Prepared) -> tuple[CpuSource, tuple[str, ...]]:
        """The program, and the modules whose pre-scale it multiplies at run time."""
        with self.clock.stage("export"):
            graph = export_decoder(
                self.model.spec(),
                prepared.checkpoint,
                weights=prepared.precision,
                kv_cache=cast(KvFormat, self.resolved.quantize.kv_cache),
                max_context=self.resolved.engine.max_context,
                block_size=self.resolved.engine.block_size,
            )
        with self.clock.stage("passes"):
            graph = apply_passes(graph)
        with self.clock.stage("lower"):
            return lower_cpu(graph, self.resolved.target, self.resolved.recipe), tuple(explicit_prescales(graph))

    def _measure(
        self, source: CpuSource, rank: Path, entries: tuple[Entry, Entry], report: dict[str, JsonValue]
    ) -> GateRecord:
        """What the plan in `rank` loses. Raises BuildError, and keeps the report, when the recipe does not allow it.

        entries: the plan's code and weights, locked by the caller.
        """
        if not self.gate:
            return skipped_gate()
        gate, engine = self.resolved.gate, self.resolved.engine
        with (
            self.clock.stage("gate"),
            tempfile.TemporaryDirectory(prefix="reference-", dir=self.store.root) as directory,
            ExitStack() as stack,
        ):
            held, ids = held_out(gate, checkpoint_tokenizer(self.model.checkpoint), engine.max_context)
            candidate = stack.enter_context(closing(open_plan(source, rank, engine, self.resolved.quantize.kv_cache)))
            reference, kind = None, None
            if (self.resolved.quantize.weights, self.resolved.quantize.kv_cache) != ("fp32", "fp32"):
                arguments = (self.model.checkpoint, self.model.spec(), engine, self.store, Path(directory))
                plan = reference_plan(*arguments, self.clock.progress, held=entries)
                reference = stack.enter_context(closing(open_plan(plan.source, Path(directory), engine, "fp32")))
                kind = plan.kind
            result = GateResult.of(measure(candidate, reference, ids, self.clock.progress))
        if problems := judge(result, gate):
            reject(self.place, entries[1].record.key, problems, result, report)
        return gate_record(result, held.digest, kind, skipped=False)

    def _predict(self, source: CpuSource, code: Stage, weights: Stage, checkpoint: Checkpoint) -> Estimate:
        """What is left to do will take this. Raises BuildError where the machine does not have it."""
        predicted = estimate(
            source.program,
            checkpoint.tensors,
            code=not self.store.has(code),
            weights=not self.store.has(weights),
            linked=same_disk(self.store.root, self.place),
            reference=self.gate,
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
