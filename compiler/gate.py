"""What a built plan loses against the unquantized model, and whether a recipe allows it.

Both plans run held-out text through the runtime's engine in steps of the same shape, chunk by chunk, so that the logits
of one chunk of each are all that memory holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from plankiln.bundle import Bundle
from plankiln.checkpoint import Checkpoint
from plankiln.compiler.atomic import make_directory
from plankiln.compiler.cpu.compile import CpuSource
from plankiln.errors import BuildError, Problem
from plankiln.manifest import GateRecord
from plankiln.quantize.datasets import Texts, texts, token_ids
from plankiln.recipe import Engine as Limits
from plankiln.recipe import Gate
from plankiln.runtime.blocks import blocks_for
from plankiln.runtime.cpu import CpuEngine
from plankiln.runtime.engine import Capabilities, Engine, FloatArray, Step
from plankiln.runtime.llm import open_engine
from plankiln.runtime.text import Tokenizer

Progress = Callable[[str, int, int], None]
ReferenceKind = Literal["fp32", "dequantized source"]
_ROWS = 32  # of logits that are worked on at a time: they stay in the cache
_LARGEST_LOSS = 700.0  # nats: its exponential is still a number
_HINT = (
    "take more `calibration.samples`, a smaller `group_size` or another `weights` format, or `exclude` the worst of "
    "the report's `matrices`; `--no-gate` publishes it as it is, and the manifest says so"
)


@dataclass(frozen=True)
class Losses:
    """What each prediction lost, in nats, one entry for each of the tokens measured.

    loss, reference_loss: -log of the probability of the token that follows. divergence: KL(reference ‖ candidate).
    agrees: whether both plans prefer the same token. Without a reference all but `loss` are empty.
    non_finite: where the first logits that are no numbers came from, after which nothing was measured; or empty.
    """

    loss: NDArray[np.float64]
    reference_loss: NDArray[np.float64]
    divergence: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    non_finite: str


@dataclass(frozen=True)
class GateResult:
    """Losses in a few numbers; divergences in nats. None: there was no reference, or nothing was measured."""

    tokens: int
    perplexity: float | None
    reference_perplexity: float | None
    kl_mean: float | None
    kl_p99: float | None
    top1_agreement: float | None
    non_finite: str

    @classmethod
    def of(cls, losses: Losses) -> GateResult:
        compared = bool(losses.divergence.size) and not losses.non_finite
        return cls(
            tokens=losses.loss.size,
            perplexity=_perplexity(losses.loss) if losses.loss.size and not losses.non_finite else None,
            reference_perplexity=_perplexity(losses.reference_loss) if compared else None,
            kl_mean=_tidy(losses.divergence.mean()) if compared else None,
            kl_p99=_tidy(np.percentile(losses.divergence, 99)) if compared else None,
            top1_agreement=_tidy(losses.agrees.mean()) if compared else None,
            non_finite=losses.non_finite,
        )


def open_plan(source: CpuSource, directory: Path, limits: Limits, kv_cache: str) -> CpuEngine:
    """The engine of the plan.so and weights.bin in `directory`, which `source` was compiled to.

    kv_cache: the cache's format as recipes call it.
    """
    program = source.program
    capabilities = Capabilities(
        kv="paged",
        kv_dtype=kv_cache,
        kv_bytes_per_token=program.kv_bytes_per_token,
        block_size=limits.block_size,
        max_sequences=limits.max_sequences,
        max_tokens_per_step=limits.max_tokens_per_step,
        max_context=limits.max_context,
        max_logit_rows=limits.max_logit_rows,
        kv_memory=limits.kv_memory,
        vocab_size=program.vocab,
    )
    weights = np.memmap(directory / "weights.bin", np.uint8, "r")
    return CpuEngine(directory / "plan.so", weights, capabilities)


def open_built(bundle: Bundle) -> Engine:
    """The engine of a published bundle. Raises BundleError and EngineError."""
    return open_engine(bundle)


def tokenizer_of(bundle: Bundle) -> Tokenizer:
    """A published bundle's tokenizer. Raises BundleError."""
    return Tokenizer(
        bundle.tokenizer_json,
        chat_template=bundle.chat_template,
        special_tokens=bundle.manifest.special_tokens,
        add_bos=bundle.manifest.add_bos,
    )


def checkpoint_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a bundle of this checkpoint will have. Raises CheckpointError."""
    special = dict(checkpoint.special_tokens)
    return Tokenizer(
        checkpoint.tokenizer_json,
        chat_template=checkpoint.chat_template,
        add_bos=bool(special.pop("add_bos_token", False)),
        special_tokens=special,
    )


def held_out(gate: Gate, tokenizer: Tokenizer, max_context: int) -> tuple[Texts, list[list[int]]]:
    """The gate's texts and their token ids, no text longer than the plan's context. Raises TextError."""
    found = texts(gate.text, "held_out")
    length = min(gate.text.max_tokens, max_context)
    return found, token_ids(found, tokenizer.encode, tokenizer.encode_chat, gate.text.samples, length)


def measure(candidate: Engine, reference: Engine | None, ids: Sequence[Sequence[int]], progress: Progress) -> Losses:
    """Run both plans over the texts, teacher-forced; every token but a text's first is predicted.

    reference: None for a candidate that is unquantized, whose logits are only checked for numbers. ids: a text each, of
    at least 2 tokens and at most either plan's context. progress("gate", tokens done, tokens in all). Both engines'
    KV caches are remade. Raises EngineError.
    """
    engines = [candidate, *([reference] if reference else [])]
    longest = max(map(len, ids))
    for engine in engines:
        engine.allocate_kv(blocks_for(longest, engine.capabilities.block_size))
    limits = [engine.capabilities for engine in engines]
    width = min(min(limit.max_tokens_per_step, limit.max_logit_rows) for limit in limits)
    total, done = sum(len(text) - 1 for text in ids), 0
    parts: list[Losses] = []
    for number, text in enumerate(ids):
        tokens = np.array(text, np.int32)
        for start in range(0, tokens.size - 1, width):
            end = min(start + width, tokens.size - 1)
            chunk = [_run(engine, tokens[start:end], start) for engine in engines]
            for which, logits in zip(("the plan", "the reference"), chunk, strict=False):
                if (row := _first_non_finite(logits)) is not None:
                    where = f"{which}, at token {start + row} of text {number}"
                    return joined(parts, where)
            parts.append(_losses(chunk[0], chunk[1] if reference else None, tokens[start + 1 : end + 1]))
            done += end - start
            progress("gate", done, total)
    return joined(parts)


def judge(result: GateResult, gate: Gate) -> list[Problem]:
    """What the recipe does not allow: each number over its limit, and logits that are no numbers in any case."""
    if result.non_finite:
        hint = "the model's weights or scales overflow in these formats: use `bf16` for the worst layers, or `fp32`"
        return [Problem("the plan computes logits that are not finite", result.non_finite, hint)]
    problems = []
    if result.perplexity is not None and result.reference_perplexity is not None:
        increase = round(result.perplexity / result.reference_perplexity - 1, 6)
        if increase > gate.max_perplexity_increase:
            what = (
                f"perplexity {result.perplexity:.4g} is {increase:.1%} above the unquantized model's "
                f"{result.reference_perplexity:.4g}, and {gate.max_perplexity_increase:.1%} are allowed"
            )
            problems.append(Problem(what, "`gate.max_perplexity_increase`", _HINT))
    for key, name, value, limit in (
        ("max_kl_mean", "mean KL divergence", result.kl_mean, gate.max_kl_mean),
        ("max_kl_p99", "99th percentile of the KL divergence", result.kl_p99, gate.max_kl_p99),
    ):
        if value is not None and limit is not None and value > limit:
            what = f"{name} from the unquantized model is {value:.3g} nats, and {limit:g} are allowed"
            problems.append(Problem(what, f"`gate.{key}`", _HINT))
    agreed, least = result.top1_agreement, gate.min_top1_agreement
    if agreed is not None and least is not None and agreed < least:
        what = f"top-1 agreement with the unquantized model is {agreed:.2%}, and {least:.2%} are wanted"
        problems.append(Problem(what, "`gate.min_top1_agreement`", _HINT))
    return problems


def gate_record(result: GateResult, text_digest: str, reference: ReferenceKind | None, skipped: bool) -> GateRecord:
    """What the manifest says of a plan that `judge` lets pass, or whose limits were not asked for (`skipped`)."""
    assert result.perplexity is not None
    return GateRecord(
        measured_on="engine",
        passed=not skipped,
        skipped=skipped,
        reference=reference if result.kl_mean is not None else None,
        text=text_digest,
        **{name: value for name, value in asdict(result).items() if name != "non_finite"},
    )


def skipped_gate() -> GateRecord:
    """What the manifest says of a plan that was not measured, by `--no-gate`."""
    return GateRecord(measured_on="engine", passed=False, skipped=True)


def reject(place: Path, key: str, problems: Sequence[Problem], result: GateResult, report: dict[str, Any]) -> NoReturn:
    """Keep the report of a build that did not pass, and raise BuildError with the problems, which names the file.

    place: OUT/RECIPE/TARGET, where the bundle would be. key: digest that tells such builds apart. report: what the
    bundle's report.json would say.
    """
    path = place / f"rejected-{key[:16]}.json"
    content = {"problems": [asdict(problem) for problem in problems], "gate": asdict(result), **report}
    try:
        make_directory(place)
        path.write_text(json.dumps(content, indent=1) + "\n")
        kept = f"the report is kept: `{path}`"
    except OSError as error:
        kept = f"the report could not be kept ({error.strerror}): `{path}`"
    raise BuildError([*problems, Problem("the gate did not let the bundle pass, and it is not published", kept)])


def _run(engine: Engine, tokens: NDArray[np.int32], start: int) -> FloatArray:
    """Logits of all rows of one step [len(tokens), vocab], a view that the engine's next step overwrites."""
    blocks = blocks_for(start + tokens.size, engine.capabilities.block_size)
    return engine.execute(
        Step(
            input_ids=tokens,
            positions=np.arange(start, start + tokens.size, dtype=np.int32),
            seq_starts=np.array([0, tokens.size], np.int32),
            context_lens=np.array([start], np.int32),
            block_table=np.arange(blocks, dtype=np.int32)[None],
            logit_rows=np.arange(tokens.size, dtype=np.int32),
        )
    )


def _first_non_finite(logits: FloatArray) -> int | None:
    """The first row that has an infinity or NaN; any such value makes the row's sum one."""
    if np.isfinite(logits.sum(axis=1, dtype=np.float64)).all():
        return None
    rows = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    return int(rows[0]) if rows.size else None


def _losses(candidate: FloatArray, reference: FloatArray | None, targets: NDArray[np.int32]) -> Losses:
    """Of one chunk; logits [T, vocab] finite, targets [T]. Exponentials in float32, sums and logarithms in float64."""
    found: list[Losses] = []
    none = np.empty(0)
    for at in range(0, targets.size, _ROWS):
        rows, wanted = slice(at, at + _ROWS), targets[at : at + _ROWS]
        x, log_total, loss = _shifted(candidate[rows], wanted)
        if reference is None:
            found.append(Losses(loss, none, none, none.astype(np.bool_), ""))
            continue
        y, reference_log_total, reference_loss = _shifted(reference[rows], wanted)
        mean = (np.exp(y) * (y - x)).sum(axis=1, dtype=np.float64) / np.exp(reference_log_total)
        divergence = np.maximum(mean - reference_log_total + log_total, 0.0)
        found.append(Losses(loss, reference_loss, divergence, x.argmax(axis=1) == y.argmax(axis=1), ""))
    return joined(found)


def _shifted(
    logits: FloatArray, targets: NDArray[np.int32]
) -> tuple[FloatArray, NDArray[np.float64], NDArray[np.float64]]:
    """The logits with their maximum at 0, the log of their exponentials' sum, and the targets' losses."""
    x = logits - logits.max(axis=1, keepdims=True)
    log_total = np.log(np.exp(x).sum(axis=1, dtype=np.float64))
    return x, log_total, log_total - x[np.arange(targets.size), targets]


def joined(parts: Sequence[Losses], non_finite: str = "") -> Losses:
    """Losses of several texts in one; `non_finite` is the first that a part has, or the one given."""
    none = np.empty(0)
    whole = [Losses(none, none, none, none.astype(np.bool_), ""), *parts]
    return Losses(
        loss=np.concatenate([part.loss for part in whole]),
        reference_loss=np.concatenate([part.reference_loss for part in whole]),
        divergence=np.concatenate([part.divergence for part in whole]),
        agrees=np.concatenate([part.agrees for part in whole]),
        non_finite=next((part.non_finite for part in parts if part.non_finite), non_finite),
    )


def _perplexity(losses: NDArray[np.float64]) -> float:
    return _tidy(exp(min(float(losses.mean()), _LARGEST_LOSS)))


def _tidy(value: float | np.floating[Any]) -> float:
    """Six significant digits: more are noise."""
    return float(f"{value:.6g}")
