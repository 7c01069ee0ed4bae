"""The loop: schedule → execute → sample → commit."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from plankiln.errors import BundleError, EngineError, RequestError
from plankiln.host import memory
from plankiln.runtime.blocks import BlockPool, blocks_for, pool_size
from plankiln.runtime.engine import Capabilities, Engine, FloatArray, Step
from plankiln.runtime.request import Delta, FinishReason, Request, RequestOutput
from plankiln.runtime.sampling import SamplingParams, choose, uniform
from plankiln.runtime.scheduler import Chunk, Plan, Scheduler, StepBuffers
from plankiln.runtime.text import TextStream, Tokenizer
from plankiln.runtime.turns import Turns

if TYPE_CHECKING:
    from plankiln.bundle import Bundle

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
_CLOSED = "the engine is closed"


class LLM:
    """Generates text with an engine, many requests at a time.

    Threads may share it: their requests run in the same steps, and one thread at a time computes one. A forked child
    must not use it. After `close` every call raises EngineError, but for `cancel`, which does nothing, and `close`.

    kv_blocks: size of the KV cache in blocks; by default enough for `max_sequences` full contexts, but no more than
    half of the memory available. Raises EngineError when the engine cannot allocate it.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, eos_ids: Iterable[int], *, kv_blocks: int | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        capabilities = engine.capabilities
        self.pool = BlockPool(pool_size(capabilities, memory().available, kv_blocks))
        engine.allocate_kv(self.pool.total)
        self.scheduler = Scheduler(capabilities, self.pool)
        self._buffers = StepBuffers(capabilities)
        self._ids = count()
        self._submitted: list[Delta] = []
        self._turns = Turns()  # for all that steps, or changes what a step reads
        self._closed = False

    @classmethod
    def load(
        cls,
        bundle_path: Path | str,
        *,
        threads: int | None = None,
        kv_blocks: int | None = None,
        manifest_sha256: str | None = None,
        verify: Literal["code", "full"] = "code",
        allow_provisional: bool = False,
    ) -> LLM:
        """Open a bundle and get ready to generate.

        threads: default is what the process may use. kv_blocks: as for the class.
        manifest_sha256: refuse every bundle but the one whose manifest has this digest.
        verify: "full" hashes the weights too; all the rest always is.
        allow_provisional: accept a bundle whose quality was predicted on a CPU but not measured on its device yet.
        Raises BundleError for a bundle that is damaged, untrusted, provisional or not for this machine.
        """
        from plankiln.bundle import open_bundle

        bundle = open_bundle(bundle_path, manifest_sha256=manifest_sha256, verify=verify)
        gate = bundle.manifest.gate
        if gate is not None and gate.provisional and not allow_provisional:
            what = "the bundle is provisional: its quality was predicted on a CPU, not measured on its device"
            hint = f"run `plankiln gate {bundle.path}` on the device, or pass `allow_provisional=True`"
            raise BundleError(what, f"`{bundle.path}`", hint)
        tokenizer = Tokenizer(
            bundle.tokenizer_json,
            chat_template=bundle.chat_template,
            special_tokens=bundle.manifest.special_tokens,
            add_bos=bundle.manifest.add_bos,
        )
        engine = open_engine(bundle, threads)
        try:
            return cls(engine, tokenizer, bundle.eos_token_ids, kv_blocks=kv_blocks)
        except BaseException:
            engine.close()
            raise

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what is unfinished with an error and free the engine, once the step that runs is over."""
        self._turns.take(self._end)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Finish every prompt; outputs are in the prompts' order.

        prompts: texts or token ids; a single text is one prompt. params: one for all, or one each.
        Raises RequestError, before anything runs, when one of them can never be served. What fails later
        (an engine error, non-finite logits) is told by its output's finish_reason "error".
        """
        self._check_open()
        todo = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(todo)
        if len(each) != len(todo):
            raise RequestError(f"{len(todo)} prompts, but {len(each)} params", hint="give one for all, or one each")
        deltas: list[Delta] = []
        requests = [self._request(prompt, p, deltas) for prompt, p in zip(todo, each, strict=True)]
        outputs: dict[int, RequestOutput] = {}
        try:
            self._submit(*requests)
            while len(outputs) < len(requests):
                self._advance(deltas)
                outputs |= {delta.request_id: delta.output for delta in _taken(deltas) if delta.output}
        finally:
            for request in requests:
                self.cancel(request.id)
        return [outputs[request.id] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Deltas of one request as they come; closing the iterator cancels it.

        Several streams may be read in turn, or each by a thread of its own: they share the steps. Raises RequestError
        at once, as `generate` does.
        """
        self._check_open()
        deltas: list[Delta] = []
        return self._stream(self._request(prompt, params, deltas), deltas)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **variables: Any
    ) -> RequestOutput:
        """The assistant's next turn. messages, variables: see Tokenizer.encode_chat."""
        return self.generate([self.tokenizer.encode_chat(messages, **variables)], params)[0]

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request for `step`; returns its id. Raises RequestError when it can never be served."""
        self._check_open()
        request = self._request(prompt, params, self._submitted)
        self._submit(request)
        return request.id

    def step(self) -> list[Delta]:
        """Compute one step; returns what is new about submitted requests since the last call."""
        self._advance()
        return _taken(self._submitted)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step, which frees its blocks. Finished ones are left alone."""
        self.scheduler.cancel(request_id)

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> FloatArray:
        """Logits of every position, float32 [len(token_ids), vocab], teacher-forced, `chunk` tokens a step.

        Uses free blocks of the KV cache for the time of the call. Raises RequestError when they do not suffice.
        """
        return self._turns.take(lambda: self._teacher_forced(token_ids, chunk))

    def _teacher_forced(self, token_ids: Sequence[int], chunk: int | None) -> FloatArray:
        self._check_open()
        limits = self.engine.capabilities
        tokens = self._tokens(token_ids)
        widest = min(limits.max_tokens_per_step, limits.max_logit_rows)
        if chunk is not None and chunk < 1:
            raise RequestError(f"`chunk` must be at least 1, not `{chunk}`")
        if tokens.size > limits.max_context:
            raise RequestError(f"{tokens.size} tokens, but the plan's context is {limits.max_context}")
        self._end_cancelled()
        need = blocks_for(tokens.size, limits.block_size)
        if not self.pool.can_allocate(need):
            raise RequestError(f"{tokens.size} tokens take {need} KV blocks, but {self.pool.free} are free")
        out = np.empty((tokens.size, limits.vocab_size), np.float32)
        blocks = self.pool.allocate(need)
        try:
            for start in range(0, tokens.size, width := min(chunk or widest, widest)):
                part = tokens[start : start + width]
                step = Step(
                    input_ids=part,
                    positions=np.arange(start, start + part.size, dtype=np.int32),
                    seq_starts=np.array([0, part.size], np.int32),
                    context_lens=np.array([start], np.int32),
                    block_table=np.array([blocks], np.int32),
                    logit_rows=np.arange(part.size, dtype=np.int32),
                )
                out[start : start + part.size] = self.engine.execute(step)
        finally:
            self.pool.release(blocks)
        return out

    def _stream(self, request: Request, deltas: list[Delta]) -> Iterator[Delta]:
        try:
            self._submit(request)
            while True:
                while not deltas:
                    self._advance(deltas)
                delta = deltas.pop(0)
                yield delta
                if delta.output:
                    return
        finally:
            self.cancel(request.id)

    def _submit(self, *requests: Request) -> None:
        def queue() -> None:
            self._check_open()
            for request in requests:
                self.scheduler.submit(request)

        self._turns.take(queue)

    def _end(self) -> None:
        self._closed = True
        for request in [*self.scheduler.running.values(), *self.scheduler.waiting]:
            self._finish(request, "error", error=_CLOSED)
        self.engine.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(_CLOSED)

    def _request(self, prompt: Prompt, params: SamplingParams | None, deltas: list[Delta]) -> Request:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not `{type(params).__name__}`")
        ids = self._tokens(prompt)
        max_tokens = self.scheduler.room(ids.size, params.max_tokens)
        tokens = np.empty(ids.size + max_tokens, np.int32)
        tokens[: ids.size] = ids
        return Request(
            id=next(self._ids),
            tokens=tokens,
            prompt_length=ids.size,
            length=ids.size,
            max_tokens=max_tokens,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            params=params,
            stream=TextStream(self.tokenizer, ids.tolist(), params.stop),
            deltas=deltas,
        )

    def _tokens(self, prompt: Prompt) -> NDArray[np.int32]:
        given = self.tokenizer.encode(prompt) if isinstance(prompt, str) and prompt else prompt
        try:
            ids = np.array(given if len(given) else [])
        except (TypeError, ValueError):  # without a length, or ragged
            ids = np.array(None)
        if not ids.size:
            raise RequestError("the prompt is empty", hint="give at least one token")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("a prompt must be a text or a list of token ids")
        vocab = self.engine.capabilities.vocab_size
        if (bad := ids[(ids < 0) | (ids >= vocab)]).size:
            raise RequestError(f"token id `{bad[0]}` is not in the vocabulary of {vocab}")
        return ids.astype(np.int32)

    def _advance(self, news: Sequence[Delta] = ()) -> None:
        """One step, unless another thread's has brought `news` while this one waited for its turn."""
        self._turns.take(lambda: None if news else self._compute())

    def _compute(self) -> None:
        """Nothing changes before its tokens are known; each request then changes whole or not at all, so
        that what an interrupt has left undone is computed again by the next step, to the same bits."""
        self._check_open()
        self._end_cancelled()
        plan = self.scheduler.plan()
        if not plan.chunks:
            return
        self.scheduler.admit(plan)
        try:
            tokens = iter(self._choose(plan, self._execute(plan)))
        except Exception as error:  # whatever an engine raises, the other requests must go on
            for chunk in plan.chunks:
                self._finish(chunk.request, "error", error=f"the engine failed: {str(error) or type(error).__name__}")
            return
        for chunk in plan.chunks:
            if chunk.samples:
                self._accept(chunk, next(tokens))
            else:
                chunk.request.computed += chunk.count

    def _end_cancelled(self) -> None:
        for request in self.scheduler.take_cancelled():
            self._finish(request, "cancelled")

    def _execute(self, plan: Plan) -> FloatArray:
        step = self._buffers.pack(plan.chunks)
        logits = self.engine.execute(step)
        expected = (step.logit_rows.size, self.engine.capabilities.vocab_size)
        if logits.shape != expected:
            raise EngineError(f"it returned logits of shape {logits.shape}, not {expected}")
        return logits

    def _choose(self, plan: Plan, logits: FloatArray) -> list[int | str]:
        """For each row of logits its token, or why there is none."""
        requests = [chunk.request for chunk in plan.chunks if chunk.samples]
        if not requests:
            return []
        uniforms = [uniform(r.seed, r.generated) if r.params.temperature else 0.0 for r in requests]
        return choose(logits, [r.params for r in requests], uniforms)

    def _accept(self, chunk: Chunk, token: int | str) -> None:
        request = chunk.request
        if isinstance(token, str):
            self._finish(request, "error", error=token)
            return
        params, stream, text = request.params, request.stream.copy(), ""
        ends = token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos)
        if not ends:
            text = stream.add(token)
        if ends or stream.stopped:
            self._finish(request, "stop", stream, (token,), text)
        elif request.generated + 1 == request.max_tokens:
            self._finish(request, "length", stream, (token,), text)
        else:
            request.commit(chunk.count, stream, Delta(request.id, text, (token,)))

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        stream: TextStream | None = None,
        new: tuple[int, ...] = (),
        text: str = "",
        error: str = "",
    ) -> None:
        """End a request, with what its last step adds."""
        stream = stream or request.stream.copy()
        text += stream.finish()
        if reason == "length" and stream.stopped:
            reason = "stop"
        prompt, end = request.prompt_length, request.length
        output = RequestOutput(
            request_id=request.id,
            prompt_token_ids=tuple(request.tokens[:prompt].tolist()),
            token_ids=(*request.tokens[prompt:end].tolist(), *new),
            text="".join([*request.text, text]),
            finish_reason=reason,
            error=error or None,
            seed=request.seed,
        )
        delta = Delta(request.id, text, new, output)
        self.scheduler.remove(request)
        request.deltas += [delta]


def open_engine(bundle: Bundle, threads: int | None = None) -> Engine:
    """The engine of an opened bundle, without a KV cache yet. Raises BundleError and EngineError."""
    from plankiln.runtime.cpu import CpuEngine

    manifest = bundle.manifest
    capabilities = Capabilities(
        kv="paged",
        kv_dtype=manifest.formats.kv_cache,
        kv_bytes_per_token=manifest.kv_bytes_per_token,
        vocab_size=manifest.model.vocab_size,
        **manifest.limits.model_dump(),
    )
    return CpuEngine(bundle.sealed_code(), bundle.weights[0], capabilities, threads)


def _taken(deltas: list[Delta]) -> list[Delta]:
    """Empty the list; with no call in between, no interrupt and no other thread's delta falls there."""
    taken = deltas[:]
    del deltas[:]
    return taken
