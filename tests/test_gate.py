"""The gate: its numbers by hand, what it refuses, what is kept, and real plans against each other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import edit_manifest, make_bundle
from checkpoints import write_tiny_hf
from engines import FunctionEngine, capabilities, hash_engine, hash_logits
from plans import quick_compiler, write_recipe

from plankiln import cli
from plankiln.bundle import read_manifest
from plankiln.compiler import regate as regating
from plankiln.compiler.gate import GateResult, gate_record, judge, measure, reject
from plankiln.compiler.pipeline import build
from plankiln.console import QuietProgress
from plankiln.errors import BuildError, BundleError
from plankiln.manifest import GateRecord
from plankiln.recipe import Gate
from plankiln.runtime.engine import Engine, FloatArray, Int32Array
from plankiln.runtime.llm import LLM

RECORD = GateRecord(
    measured_on="engine",
    passed=True,
    skipped=False,
    reference="fp32",
    tokens=2044,
    text="ab" * 32,
    perplexity=22.0,
    reference_perplexity=21.0,
    kl_mean=0.01,
    kl_p99=0.1,
    top1_agreement=0.95,
)


def quiet(what: str, done: int, total: int) -> None: ...


def result(candidate: Engine, reference: Engine | None, ids: Sequence[Sequence[int]]) -> GateResult:
    return GateResult.of(measure(candidate, reference, ids, quiet))


def constant(probabilities: Sequence[float]) -> FunctionEngine:
    """An engine whose logits are always these probabilities', moved by a constant that must not matter."""
    logits = (np.log(probabilities) + 40).astype(np.float32)
    return FunctionEngine(lambda tokens: logits, capabilities(vocab_size=len(probabilities)))


class TestNumbers:
    def test_by_hand(self) -> None:
        """Two tokens: p = (1/2, 1/2) and q = (1/4, 3/4); the text predicts 1, 0, 1."""
        found = result(constant([0.25, 0.75]), constant([0.5, 0.5]), [[0, 1, 0, 1]])
        loss = -(np.log(0.75) + np.log(0.25) + np.log(0.75)) / 3
        divergence = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
        assert found.tokens == 3
        assert found.perplexity == pytest.approx(np.exp(loss), rel=1e-5)
        assert found.reference_perplexity == pytest.approx(2, rel=1e-5)
        assert found.kl_mean == pytest.approx(divergence, rel=1e-5)
        assert found.kl_p99 == pytest.approx(divergence, rel=1e-5)
        assert found.top1_agreement == 0  # the reference's tie goes to the first
        assert found.non_finite == ""

    def test_against_softmax_in_float64(self) -> None:
        """Many texts, chunked by the smaller of the engines' steps; the chunks change nothing."""

        def other(tokens: Int32Array) -> FloatArray:
            return (hash_logits(tokens) + hash_logits(tokens[::-1].copy()) / 4).astype(np.float32)

        ids = [np.random.default_rng(i).integers(0, 33, n).tolist() for i, n in enumerate((2, 17, 40, 33))]
        losses = measure(FunctionEngine(other, capabilities(max_logit_rows=7)), hash_engine(), ids, quiet)
        expected: list[tuple[float, float, float, bool]] = []
        for text in ids:
            for end in range(1, len(text)):
                seen = np.array(text[:end], np.int32)
                q, p = (x - np.log(np.exp(x).sum()) for x in (f(seen).astype(np.float64) for f in (other, hash_logits)))
                divergence = float((np.exp(p) * (p - q)).sum())
                expected.append((-q[text[end]], -p[text[end]], divergence, bool(q.argmax() == p.argmax())))
        columns = [np.array(column) for column in zip(*expected, strict=True)]
        for got, wanted in zip(
            (losses.loss, losses.reference_loss, losses.divergence, losses.agrees), columns, strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
        found = GateResult.of(losses)
        assert found.kl_p99 == pytest.approx(np.percentile(columns[2], 99), rel=1e-4)
        assert found.top1_agreement == pytest.approx(columns[3].mean(), rel=1e-5)

    def test_a_plan_differs_in_nothing_from_itself(self) -> None:
        found = result(hash_engine(), hash_engine(), [[1, 2, 3, 4]])
        assert (found.kl_mean, found.kl_p99, found.top1_agreement) == (0, 0, 1)
        assert found.perplexity == found.reference_perplexity

    def test_unquantized_is_compared_with_nothing(self) -> None:
        found = result(hash_engine(), None, [[1, 2, 3, 4]])
        assert found.perplexity is not None
        assert (found.reference_perplexity, found.kl_mean, found.kl_p99, found.top1_agreement) == (None,) * 4
        assert judge(found, Gate(max_kl_mean=0)) == []
        assert gate_record(found, "ab" * 32, "fp32", skipped=False).reference is None

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("whose", ["the plan", "the reference"])
    def test_non_finite_names_the_first_token(self, bad: float, whose: str) -> None:
        def broken(tokens: Int32Array) -> FloatArray:
            logits = hash_logits(tokens)
            if tokens.size >= 19 and tokens[0] == 5:
                logits[7] = bad
            return logits

        engines: list[Engine] = [FunctionEngine(broken), hash_engine()]
        candidate, reference = engines if whose == "the plan" else engines[::-1]
        found = result(candidate, reference, [[1] * 30, [5] * 30, [5] * 30])
        assert found.non_finite == f"{whose}, at token 18 of text 1"
        assert found.perplexity is None
        (problem,) = judge(found, Gate(max_perplexity_increase=1e6))
        assert "not finite" in problem.what
        assert "token 18" in problem.where


class TestLimits:
    FOUND = GateResult(100, 22.0, 20.0, 0.05, 0.5, 0.9, "")

    def test_all_over(self) -> None:
        gate = Gate(max_perplexity_increase=0.09, max_kl_mean=0.04, max_kl_p99=0.4, min_top1_agreement=0.91)
        problems = judge(self.FOUND, gate)
        assert [problem.where for problem in problems] == [
            f"`gate.{key}`" for key in ("max_perplexity_increase", "max_kl_mean", "max_kl_p99", "min_top1_agreement")
        ]
        assert "10.0% above the unquantized model's 20, and 9.0% are allowed" in problems[0].what
        assert "exclude" in problems[0].hint

    def test_at_the_limit(self) -> None:
        gate = Gate(max_perplexity_increase=0.11, max_kl_mean=0.05, max_kl_p99=0.5, min_top1_agreement=0.9)
        assert judge(self.FOUND, gate) == []

    def test_no_limit(self) -> None:
        assert judge(replace(self.FOUND, kl_mean=9.0, top1_agreement=0.0), Gate()) == []

    def test_the_report_of_a_rejected_build_is_kept(self, tmp_path: Path) -> None:
        problems = judge(self.FOUND, Gate(max_perplexity_increase=0.01))
        place = tmp_path / "out" / "tiny" / "cpu-generic"
        with pytest.raises(BuildError, match="above the unquantized") as caught:
            reject(place, "ab" * 32, problems, self.FOUND, {"seconds": {"code": 1.5}})
        (kept,) = place.iterdir()
        assert kept.name == f"rejected-{'ab' * 8}.json"
        assert str(kept) in str(caught.value)
        report = json.loads(kept.read_text())
        assert report["gate"]["perplexity"] == 22.0
        assert report["problems"][0]["where"] == "`gate.max_perplexity_increase`"
        assert report["seconds"] == {"code": 1.5}


class TestManifest:
    def test_what_was_measured_is_not_what_the_bundle_is(self, tmp_path: Path) -> None:
        """Another machine's last digits make no other bundle; a gate that was skipped does."""
        one = make_bundle(tmp_path / "a", gate=RECORD)
        other = make_bundle(tmp_path / "b", gate=RECORD.model_copy(update={"perplexity": 22.1}))
        skipped = make_bundle(tmp_path / "c", gate=RECORD.model_copy(update={"passed": False, "skipped": True}))
        assert one.digest == other.digest != skipped.digest

    def test_inspect_shows_the_gate(self, tmp_path: Path, call: Any) -> None:
        cases = (
            (RECORD, "passed; perplexity 22 against 21 of fp32, KL 0.01 nats (p99 0.1), top-1 agreement 95.0%"),
            (RECORD.model_copy(update={"skipped": True}), "gate       skipped (--no-gate)\n"),
            (RECORD.model_copy(update={"measured_on": "cpu-reference"}), "provisional: passed as predicted on a CPU"),
            (None, "gate       not measured"),
        )
        for number, (record, told) in enumerate(cases):
            bundle = make_bundle(tmp_path / str(number), gate=record).path
            assert told in call("inspect", bundle)[1]

    def test_provisional_is_refused(self, tmp_path: Path) -> None:
        bundle = make_bundle(tmp_path, gate=RECORD.model_copy(update={"measured_on": "cpu-reference"})).path
        with pytest.raises(BundleError, match="provisional") as caught:
            LLM.load(bundle)
        assert f"plankiln gate {bundle}" in caught.value.problems[0].hint
        with pytest.raises(BundleError) as caught:  # its tokenizer is none: it has got further
            LLM.load(bundle, allow_provisional=True)
        assert "provisional" not in str(caught.value)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([*map(str, arguments)])
        return (int(caught.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture
def recipe(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "store"))
    quick_compiler(tmp_path, monkeypatch)
    return write_recipe(tmp_path / "tiny.yaml", model, format="bf16")


class TestBuild:
    def test_over_the_limit_is_not_published(self, recipe: Path, tmp_path: Path, call: Any) -> None:
        strict = ("--set", "gate.max_kl_mean=0")
        code, out, err = call("build", recipe, "-q", "--out", tmp_path / "out", *strict)
        assert (code, out) == (1, "")
        assert "`gate.max_kl_mean`" in err
        (kept,) = (tmp_path / "out").glob("*/*/*")
        assert kept.name.startswith("rejected-")
        assert str(kept) in err
        report = json.loads(kept.read_text())
        assert report["gate"]["kl_mean"] > 0
        assert {"code", "weights"} <= report["seconds"].keys()

    def test_no_gate_is_recorded_and_a_later_gate_makes_another_bundle(
        self, recipe: Path, tmp_path: Path, call: Any
    ) -> None:
        strict = ("--set", "gate.max_kl_mean=0")
        code, out, err = call("build", recipe, "-q", "--no-gate", "--out", tmp_path / "out", *strict)
        assert code == 0, err
        gate = read_manifest(out.strip())[0].gate
        assert gate is not None
        assert (gate.skipped, gate.passed, gate.perplexity) == (True, False, None)
        assert call("build", recipe, "-q", "--out", tmp_path / "out", *strict)[0] == 1
        code, again, _ = call("build", recipe, "-q", "--out", tmp_path / "out")
        assert code == 0
        assert again != out
        gate = read_manifest(again.strip())[0].gate
        assert gate is not None
        assert (gate.skipped, gate.passed, gate.reference) == (False, True, "fp32")

    def test_a_bundle_does_not_keep_the_numbers_of_another_text(self, recipe: Path, tmp_path: Path) -> None:
        """The same plan, so the same digest, and the record of what it was measured on last."""
        text = tmp_path / "held-out.txt"
        found = set()
        for words in ("the quick brown fox ", "jumps over the lazy dog "):
            text.write_text(words * 40)
            settings = [f"gate.text={{kind: text, path: {text}, samples: 2, max_tokens: 32}}"]
            (result,) = build(recipe, out=tmp_path / "out", progress=QuietProgress(), overrides=settings)
            gate = read_manifest(result.path)[0].gate
            assert gate is not None
            found.add((result.digest, gate.text, gate.perplexity))
        assert [len({*column}) for column in zip(*found, strict=True)] == [1, 2, 2]

    def test_a_plan_that_this_machine_cannot_run(
        self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
    ) -> None:
        monkeypatch.setattr("plankiln.target.host_cpu_flags", lambda: frozenset())
        code, _, err = call("build", recipe, "-q", "--set", "targets=[cpu-x86-64-v3]", "--out", tmp_path / "out")
        assert code == 1
        assert "target `cpu-x86-64-v3` cannot be measured here: this machine has no" in err
        assert "--no-gate" in err

    def test_weights_that_are_the_reference_s_own(self, recipe: Path, tmp_path: Path) -> None:
        """fp32 weights with another cache: both plans are of one entry in the store, whose lock nobody may wait for."""
        script = "import sys; from plankiln.cli import build_main; build_main(sys.argv[1:])"
        command = [sys.executable, "-c", script, str(recipe), "-q", "--out", str(tmp_path / "out")]
        done = subprocess.run([*command, "--set", "quantize.weights=fp32"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        gate = read_manifest(done.stdout.strip())[0].gate
        assert gate is not None
        assert gate.reference == "fp32"


@pytest.fixture
def bundle(recipe: Path, tmp_path: Path) -> Path:
    """A bf16 bundle of the tiny model."""
    return build(recipe, out=tmp_path / "out", progress=QuietProgress(), overrides=["gate.text.samples=2"])[0].path


class TestCommand:
    def test_measures_a_bundle(self, bundle: Path, call: Any) -> None:
        code, out, err = call("gate", bundle, "--json", "-q")
        assert code == 0, err
        found = json.loads(out)
        assert found["problems"] == []
        record = found["gate"]
        assert (record["passed"], record["measured_on"], record["reference"]) == (True, "engine", "fp32")
        assert record["tokens"] == 2 * 63
        assert record["perplexity"] == pytest.approx(record["reference_perplexity"], rel=0.05)
        assert 0 < record["kl_mean"] < 0.01
        assert record["kl_mean"] < record["kl_p99"]
        code, out, _ = call("gate", bundle, "-q")
        assert code == 0
        assert "126 tokens against fp32" in out

    def test_over_the_limit(self, bundle: Path, call: Any) -> None:
        def strict(data: dict[str, Any]) -> None:
            data["recipe"]["gate"]["max_kl_mean"] = 1e-12

        edit_manifest(bundle, strict)
        code, out, err = call("gate", bundle, "--json", "-q")
        assert (code, json.loads(out)["gate"]["passed"]) == (1, False)
        assert "`gate.max_kl_mean`" in err

    def test_the_source_is_gone_or_another(self, bundle: Path, model: Path, tmp_path: Path, call: Any) -> None:
        def moved(data: dict[str, Any]) -> None:
            data["recipe"]["model"]["source"] = "gone"

        edit_manifest(bundle, moved)
        code, _, err = call("gate", bundle, "-q")
        assert code == 1
        assert "model source not found: gone" in err
        assert "--source MODEL" in err
        assert call("gate", bundle, "-q", "--source", model)[0] == 0
        other = write_tiny_hf(tmp_path / "other", "llama", seed=1)
        code, _, err = call("gate", bundle, "-q", "--source", other)
        assert code == 1
        assert "not the model that the bundle was built from" in err

    def test_a_provisional_bundle_that_passes(self, bundle: Path, call: Any) -> None:
        provisional = RECORD.model_copy(update={"measured_on": "cpu-reference"}).model_dump(mode="json")
        edit_manifest(bundle, lambda data: data.update(gate=provisional))
        with pytest.raises(BundleError, match="provisional"):
            LLM.load(bundle)
        assert call("gate", bundle, "-q")[0] == 0
        manifest, _ = read_manifest(bundle)
        assert manifest.gate is not None
        assert (manifest.gate.measured_on, manifest.gate.passed) == ("engine", True)
        LLM.load(bundle).close()

    def test_a_recipe_of_another_version(self, bundle: Path) -> None:
        manifest, _ = read_manifest(bundle)
        with pytest.raises(BundleError, match="its recipe is not one that this plankiln reads"):
            regating.recipe_of(manifest.model_copy(update={"recipe": {"recipe": "tiny"}}))
