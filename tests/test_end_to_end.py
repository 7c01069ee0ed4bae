"""From recipe to text: real builds of tiny models, against transformers and against themselves alone."""

from __future__ import annotations

import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny_hf
from numpy.typing import NDArray
from plans import VARIANTS, Format, quick_compiler, write_recipe
from test_scheduler import check
from tokenizers import Tokenizer

from plankiln import cli
from plankiln.compiler import pipeline
from plankiln.console import QuietProgress
from plankiln.errors import BundleError, CheckpointError, RequestError
from plankiln.manifest import CHUNK_BYTES
from plankiln.runtime.llm import LLM, Prompt
from plankiln.runtime.request import RequestOutput
from plankiln.runtime.sampling import SamplingParams
from plankiln.runtime.scheduler import Plan

Floats = NDArray[np.float32]
Job = tuple[list[int], SamplingParams]
ROOT = Path(__file__).parent.parent
VOCAB, CONTEXT, BOUNDARY = 259, 160, 32
# The frequencies change past position 32; sequences run to four times that.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": BOUNDARY,
}
PROMPTS = ["Once upon a time", "x", "Größe: 5 µm, 東京 \U0001f600", "def f(n):\n    return n * f(n - 1)\n" * 3]
GREEDY = SamplingParams(temperature=0, max_tokens=48)


class Oracle:
    """transformers' model and tokenizer of a directory."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        load: Any = AutoModelForCausalLM.from_pretrained
        self.model = load(directory, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def logits(self, ids: list[int]) -> Floats:
        """[len(ids), vocab], teacher-forced."""
        with self.torch.inference_mode():
            logits: Floats = self.model(self.torch.tensor([ids])).logits[0].float().numpy()
        return logits

    def greedy(self, ids: list[int]) -> tuple[int, ...]:
        with self.torch.inference_mode():
            out = self.model.generate(self.torch.tensor([ids]), max_new_tokens=GREEDY.max_tokens, do_sample=False)
        return tuple(out[0, len(ids) :].tolist())


class WatchedLLM(LLM):
    """Keeps the rows of logits that each request's tokens were chosen from, and checks the pool after every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: dict[int, list[Floats]] = defaultdict(list)

    def _execute(self, plan: Plan) -> Floats:
        logits = super()._execute(plan)
        sampling = [chunk.request.id for chunk in plan.chunks if chunk.samples]
        for request, row in zip(sampling, logits, strict=True):
            self.rows[request].append(row.copy())
        return logits

    def _compute(self) -> None:
        super()._compute()
        check(self)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    llama: dict[str, Any] = {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "vocab_size": VOCAB}
    qwen2: dict[str, Any] = {"vocab_size": VOCAB, "intermediate_size": 4000}  # more than one chunk of weights.bin
    return {
        "llama": write_tiny_hf(root / "llama", "llama", **llama),
        "qwen2": write_tiny_hf(root / "qwen2", "qwen2", seed=1, **qwen2),
    }


@pytest.fixture(scope="module")
def oracles(sources: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(path) for name, path in sources.items()} | {"bf16": Oracle(sources["llama"], "bfloat16")}


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def llama(request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama model's bundle, in fp32 and in bf16."""
    root = tmp_path_factory.mktemp(f"build-{request.param}")
    recipe = write_recipe(root / "tiny.yaml", sources["llama"], max_context=CONTEXT, format=request.param)
    (result,) = pipeline.build(recipe, out=root / "artifacts", progress=QuietProgress())
    assert result.path == root / "artifacts" / "tiny" / result.target / result.digest
    return result.path


@pytest.fixture(scope="module")
def qwen2(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The qwen2 model's bundle for a lesser target, built by the command line."""
    root = tmp_path_factory.mktemp("build")
    target = VARIANTS[-2] if len(VARIANTS) > 2 else VARIANTS[-1]
    recipe = write_recipe(root / "tiny.yaml", sources["qwen2"], max_context=CONTEXT, target=target)
    with pytest.raises(SystemExit) as caught:
        cli.build_main([str(recipe), "--out", str(root / "artifacts"), "--quiet"])
    assert not caught.value.code
    return root / "artifacts" / "tiny" / target / "latest"


@pytest.fixture
def llm(llama: Path) -> Iterator[LLM]:
    with LLM.load(llama) as llm:
        yield llm


def weights_of(bundle: Path) -> Format:
    from plankiln.bundle import read_manifest

    return "fp32" if read_manifest(bundle)[0].formats.weights == "fp32" else "bf16"


def relative(got: Floats, expected: Floats) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def rms(values: Floats) -> float:
    return float(np.sqrt(np.square(values.astype(np.float64)).mean()))


def random_ids(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, count)]


class TestAgainstTransformers:
    @pytest.mark.parametrize("chunk", [None, 1, 7, 48])
    def test_llama_logits_past_the_rope_boundary(
        self, llama: Path, llm: LLM, oracles: dict[str, Oracle], chunk: int | None
    ) -> None:
        ids = random_ids(5, CONTEXT)
        expected, got = oracles["llama"].logits(ids), llm.logits(ids, chunk)
        for part in (slice(0, 1), slice(1, BOUNDARY), slice(BOUNDARY, None)):
            if weights_of(llama) == "fp32":
                assert relative(got[part], expected[part]) <= 1e-4
            else:
                theirs = oracles["bf16"].logits(ids)[part]
                assert rms(got[part] - expected[part]) <= 1.2 * rms(theirs - expected[part])
        assert llm.pool.used == 0

    def test_qwen2_logits(self, qwen2: Path, oracles: dict[str, Oracle]) -> None:
        ids = random_ids(6, CONTEXT)
        expected = oracles["qwen2"].logits(ids)
        with LLM.load(qwen2) as llm:
            for chunk in (None, 5):
                assert relative(llm.logits(ids, chunk), expected) <= 1e-4

    def test_greedy_ids_and_text(self, llama: Path, llm: LLM, oracles: dict[str, Oracle]) -> None:
        oracle = oracles["llama"]
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
            ids = oracle.tokenizer.encode(prompt).ids
            assert output.prompt_token_ids == tuple(ids)
            assert output.text == oracle.tokenizer.decode(ids + list(output.token_ids)).removeprefix(prompt)
            if weights_of(llama) == "fp32":
                assert output.token_ids == oracle.greedy(ids)
            else:  # each choice is among the best that fp32 knows, after the same tokens
                rows = oracle.logits([*ids, *output.token_ids])[len(ids) - 1 : -1]
                chosen = rows[np.arange(len(output.token_ids)), list(output.token_ids)]
                assert (rows.max(axis=1) - chosen).max() <= 5e-2 * np.abs(rows).max()


def random_jobs(seed: int, count: int) -> list[Job]:
    """Sampled requests: prompts of 1 to 100 tokens, 1 to 40 to generate."""
    rng = np.random.default_rng(seed)
    return [
        (
            random_ids(1000 * seed + index, int(rng.integers(1, 101))),
            SamplingParams(
                max_tokens=int(rng.integers(1, 41)),
                seed=index,
                top_p=float(rng.choice([1.0, 0.9])),
                stop_token_ids=range(3, 8),
            ),
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def alone(llama: Path) -> list[tuple[Job, RequestOutput, Floats]]:
    """32 requests, each with the output and the logits [tokens, vocab] it gives with nothing else in flight."""
    with WatchedLLM.load(llama, threads=1) as llm:
        assert isinstance(llm, WatchedLLM)
        done = []
        for prompt, params in random_jobs(1, 32):
            (output,) = llm.generate([prompt], params)
            done.append(((prompt, params), output, np.stack(llm.rows[output.request_id])))
    assert {output.finish_reason for _, output, _ in done} == {"stop", "length"}
    return done


class TestInFlight:
    """A pool of 24 blocks, of which a request takes up to 9: some run, some wait."""

    @pytest.fixture
    def watched(self, llama: Path) -> Iterator[WatchedLLM]:
        with WatchedLLM.load(llama, threads=2, kv_blocks=24) as llm:
            assert isinstance(llm, WatchedLLM)
            yield llm

    def test_each_request_gives_the_bits_it_gives_alone(self, alone: Any, watched: WatchedLLM) -> None:
        jobs = [job for job, _, _ in alone]
        outputs = watched.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
        for (_, single, rows), output in zip(alone, outputs, strict=True):
            assert output.token_ids == single.token_ids
            assert (output.text, output.finish_reason) == (single.text, single.finish_reason)
            assert np.array_equal(np.stack(watched.rows[output.request_id]), rows)
        assert watched.scheduler.idle
        assert watched.pool.used == 0

    @pytest.mark.parametrize("seed", range(3))
    def test_cancels_and_late_arrivals_change_nothing(self, alone: Any, watched: WatchedLLM, seed: int) -> None:
        rng = np.random.default_rng(seed)
        order = [int(index) for index in rng.permutation(len(alone))]
        index_of: dict[int, int] = {}
        outputs: dict[int, RequestOutput] = {}
        while order or len(outputs) < len(index_of):
            for _ in range(min(len(order), int(rng.integers(0, 6)))):
                index = order.pop()
                prompt, params = alone[index][0]
                index_of[watched.submit(prompt, params)] = index
            if rng.random() < 0.15 and index_of:
                watched.cancel(int(rng.choice(list(index_of))))
            outputs |= {delta.request_id: delta.output for delta in watched.step() if delta.output}
        reasons = [output.finish_reason for output in outputs.values()]
        assert 0 < reasons.count("cancelled") < len(alone) // 2
        for request, output in outputs.items():
            _, single, rows = alone[index_of[request]]
            count = len(output.token_ids)
            assert output.token_ids == single.token_ids[:count]
            assert output.finish_reason in (single.finish_reason, "cancelled")
            assert count == len(single.token_ids) or output.finish_reason == "cancelled"
            assert all(map(np.array_equal, watched.rows[request][:count], rows))
        assert watched.scheduler.idle
        assert watched.pool.used == 0


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    def run(*arguments: object) -> SimpleNamespace:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=caught.value.code or 0, out=out, err=err)

    return run


class TestRun:
    def test_text_is_what_generate_gives(self, qwen2: Path, call: Any, oracles: dict[str, Oracle]) -> None:
        prompt = PROMPTS[0]
        ids = oracles["qwen2"].tokenizer.encode(prompt).ids
        expected = oracles["qwen2"].tokenizer.decode(ids + list(oracles["qwen2"].greedy(ids))).removeprefix(prompt)
        done = call("run", qwen2, prompt, "--max-tokens", GREEDY.max_tokens)
        assert (done.code, done.out) == (0, expected + "\n")
        assert "tokens/s" in done.err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["x" * (CONTEXT + 1)], f"the prompt has {CONTEXT + 1} tokens"),
            (["x" * CONTEXT], f"the plan's context is {CONTEXT}"),
            (["x", "--max-tokens", CONTEXT], f"together {CONTEXT + 1}"),
            ([""], "the prompt is empty"),
            (["x", "--temperature", "nan"], "`temperature` must be a finite number of at least 0, not `nan`"),
            (["x", "--top-p", "0"], "`top_p` must be more than 0 and at most 1"),
            (["x", "--min-p", "1.5"], "`min_p`"),
            (["x", "--top-k", "-1"], "`top_k`"),
            (["x", "--max-tokens", "0"], "`max_tokens`"),
            (["x", "--seed", "-1"], "`seed`"),
            (["x", "--stop", ""], "`stop`"),
            (["x", "--chat"], "this model has no chat template"),
        ],
    )
    def test_refusals_are_one_line(self, qwen2: Path, call: Any, arguments: list[str], said: str) -> None:
        done = call("run", qwen2, *arguments, *(() if "--max-tokens" in arguments else ("--max-tokens", 1)))
        assert (done.code, done.out) == (1, "")
        first, *hints = done.err.splitlines()
        assert first.startswith("error: ")
        assert said in first
        assert all(line.startswith("hint: ") for line in hints)

    def test_the_loop_lives_on_after_refusals(self, llm: LLM) -> None:
        before = llm.generate(PROMPTS, GREEDY)
        running = llm.submit(PROMPTS[0], GREEDY)
        llm.step()
        refused: list[Prompt] = ["x" * (CONTEXT + 1), "x" * CONTEXT, "", [VOCAB]]
        for prompt in refused:
            with pytest.raises(RequestError):
                llm.submit(prompt, SamplingParams(max_tokens=1))
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs = [delta.output for delta in llm.step() if delta.output]
        assert (outputs[0].request_id, outputs[0].token_ids) == (running, before[0].token_ids)
        assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == [o.token_ids for o in before]
        assert llm.pool.used == 0

    def test_prompt_that_fills_the_context(self, llm: LLM) -> None:
        (output,) = llm.generate([random_ids(7, CONTEXT - 1)], SamplingParams(ignore_eos=True))
        assert (len(output.token_ids), output.finish_reason) == (1, "length")


class TestDamaged:
    @pytest.fixture
    def copy(self, qwen2: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(qwen2.resolve(), tmp_path / "copy"))

    def test_altered_weights_are_named_by_file_and_chunk(self, copy: Path, call: Any) -> None:
        file = copy / "rank0" / "weights.bin"
        size = file.stat().st_size
        assert CHUNK_BYTES < size < 2 * CHUNK_BYTES
        with file.open("r+b") as out:
            out.seek(CHUNK_BYTES + 4096)
            byte = out.read(1)
            out.seek(CHUNK_BYTES + 4096)
            out.write(bytes([byte[0] ^ 1]))
        assert call("check", copy).code == 0
        assert call("run", copy, "x", "--max-tokens", 1).code == 0
        done = call("check", copy, "--full")
        assert (done.code, done.out) == (1, "")
        said = f"bytes {CHUNK_BYTES} to {size} are not what was built: `{file}`"
        assert done.err.startswith(f"error: {said}\nhint: ")
        with pytest.raises(BundleError, match=f"bytes {CHUNK_BYTES} to {size}"):
            LLM.load(copy, verify="full")

    @pytest.mark.parametrize("name", ["rank0/plan.so", "tokenizer.json", "manifest.json"])
    def test_altered_code_never_runs(self, copy: Path, call: Any, name: str) -> None:
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:])
        done = call("run", copy, "x")
        assert (done.code, done.out) == (1, "")
        assert name in done.err


def with_value(source: Path, directory: Path, tensor: str, value: float) -> Path:
    """A copy of an HF directory in which the last element of a tensor is `value`."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, directory)
    tensors = load_file(source / "model.safetensors")
    tensors[tensor].reshape(-1)[-1] = value
    save_file(tensors, directory / "model.safetensors")
    return directory


class TestRefusedBuilds:
    @pytest.mark.parametrize(
        ("tensor", "value"),
        [
            ("model.layers.1.mlp.up_proj.weight", np.nan),
            ("model.embed_tokens.weight", np.inf),
            ("model.norm.weight", -np.inf),
        ],
    )
    def test_non_finite_weights(
        self, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: str, value: float
    ) -> None:
        recipe = write_recipe(tmp_path / "tiny.yaml", with_value(sources["llama"], tmp_path / "model", tensor, value))
        quick_compiler(tmp_path, monkeypatch)
        with pytest.raises(CheckpointError) as caught:
            pipeline.build(recipe, out=tmp_path / "out", progress=QuietProgress())
        (problem,) = caught.value.problems
        assert problem.what.startswith(f"1 non-finite values in tensor `{tensor}`, the first is {value} at [")
        assert (problem.where, bool(problem.hint)) == (str(tmp_path / "model"), True)
        assert list((tmp_path / "out").glob("*/*/*")) == []

    def test_weights_too_large_for_bf16(
        self, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensor = "model.layers.0.self_attn.k_proj.weight"
        recipe = write_recipe(
            tmp_path / "tiny.yaml", with_value(sources["llama"], tmp_path / "model", tensor, 3.4e38), format="bf16"
        )
        quick_compiler(tmp_path, monkeypatch)
        with pytest.raises(CheckpointError, match=f"tensor `{tensor}` holds values beyond the range of bfloat16"):
            pipeline.build(recipe, out=tmp_path / "out", progress=QuietProgress())
        assert list((tmp_path / "out").glob("*/*/*")) == []

    def test_gpu_recipes_before_any_download(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
        def fail(*_: object, **__: object) -> None:
            raise AssertionError("something was fetched or run")

        monkeypatch.setattr(socket, "socket", fail)
        monkeypatch.setattr("subprocess.Popen", fail)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        started = time.monotonic()
        done = call("build", ROOT / "recipes" / "llama3-70b.yaml", "--out", tmp_path / "out")
        assert time.monotonic() - started < 10
        assert (done.code, done.out) == (1, "")
        assert "cannot build target `h100`: GPU targets are not built yet" in done.err
        assert "hint: try `--set 'targets=[cpu-native]'`" in done.err
        assert list(tmp_path.iterdir()) == []
