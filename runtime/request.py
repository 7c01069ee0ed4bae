"""One request on its way through the loop, and what its caller sees of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from plankiln.runtime.engine import Int32Array
from plankiln.runtime.sampling import SamplingParams
from plankiln.runtime.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(eq=False, slots=True)
class Request:
    """State of one request. Of the `length` tokens known (prompt, then generated), `computed` are in the cache.

    tokens: int32 [prompt_length + max_tokens], the first `length` are valid.
    max_tokens, seed: as in `params`, or what was chosen in place of None.
    deltas: where its news go; `text` keeps their texts.
    blocks: the block table, int32 [blocks], empty while the request waits.
    """

    id: int
    tokens: Int32Array
    prompt_length: int
    length: int
    max_tokens: int
    seed: int
    params: SamplingParams
    stream: TextStream
    deltas: list[Delta]
    computed: int = 0
    blocks: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    text: list[str] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Known tokens that are not in the cache yet."""
        return self.length - self.computed

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def cache_tokens(self) -> int:
        """Tokens that are in the cache at the very end: the last one generated is never read back."""
        return self.prompt_length + self.max_tokens - 1

    def commit(self, computed: int, stream: TextStream, delta: Delta) -> None:
        """`computed` more tokens are in the cache, and the delta's one token is known. `stream` has its text."""
        (token,) = delta.token_ids
        # Plain stores with no call among them: an interrupt comes before all or after all.
        self.tokens[self.length] = token
        self.computed += computed
        self.length += 1
        self.stream = stream
        self.text += [delta.text]
        self.deltas += [delta]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    text continues the prompt; it holds neither the token nor the string that ended it.
    token_ids: all that were generated, the one that ended it included.
    error: why, when finish_reason is "error".
    seed: the one that was used: giving it again gives the same tokens again.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None
    seed: int


@dataclass(frozen=True)
class Delta:
    """What one step added to a request; `output` is the whole of it, when this step was its last."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.output.finish_reason if self.output else None
