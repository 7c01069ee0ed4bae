"""Text to tokens and back: chat templates, incremental decoding, stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import tokenizers

from plankiln.chat_template import ChatTemplate
from plankiln.errors import BundleError, RequestError

_CONTEXT = 16
_MOST_HELD = 256


class Tokenizer:
    """A `tokenizers` tokenizer with its model's habits.

    chat_template: Jinja source, None when the model has none.
    special_tokens: names and texts the template may use (`bos_token`, `eos_token`, …); other values are passed over.
    add_bos: whether the model expects `bos_token` before a plain prompt.
    Raises BundleError when the tokenizer cannot be read.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, object] | None = None,
        add_bos: bool = False,
    ) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise BundleError(f"not a tokenizer ({error})", "`tokenizer.json`") from None
        self._special_tokens = {k: v for k, v in (special_tokens or {}).items() if isinstance(v, str)}
        self._template = ChatTemplate(chat_template, self._special_tokens) if chat_template else None
        bos = self._tokenizer.token_to_id(self._special_tokens.get("bos_token", ""))
        self._prefix: list[int] = []
        if add_bos:
            if bos is None:
                raise BundleError("the model wants a BOS token, but the tokenizer has none", "`tokenizer.json`")
            self._prefix = [bos]
        self.special_ids = frozenset(i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special)
        self.byte_ids = self._find_byte_ids()

    @classmethod
    def from_file(cls, path: Path | str, **habits: Any) -> Tokenizer:
        """The tokenizer of a tokenizer.json file; `habits` as for the class."""
        try:
            return cls(Path(path).read_bytes(), **habits)
        except OSError as error:
            raise BundleError(f"cannot read the tokenizer ({error.strerror})", f"`{path}`") from None

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the model's BOS in front unless the text itself starts with it.

        Raises RequestError when the text is not valid Unicode.
        """
        ids = self._ids(text)
        return ids if ids[:1] == self._prefix else self._prefix + ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation. The template says where a BOS goes: none is added.

        messages: {"role": …, "content": …}, oldest first; variables: further names the template may use (`tools`, …).
        Raises RequestError when there is no template or it refuses the messages, BundleError when it is not Jinja.
        """
        if self._template is None:
            raise RequestError("this model has no chat template", hint="give it a plain prompt")
        return self._ids(self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: lone surrogate at character {error.start}") from None
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _find_byte_ids(self) -> frozenset[int]:
        """Ids that stand for one byte each (`<0x0A>`), when the decoder joins them to characters."""
        ids = [self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        if ids[0x41] is None or self.decode([ids[0x41]]) != "A":
            return frozenset()
        return frozenset(i for i in ids if i is not None)


class Detokenizer:
    """Decodes a growing list of ids. What was given out stays right, whatever follows.

    The pieces add up to the text that the ids add to that of `prompt`: for no prompt, to `tokenizer.decode(ids)`.
    A piece ends at a token's end where no character is open; a run of byte tokens is decoded whole, because one
    broken character in it turns all of it into U+FFFD. Text is held back for 256 tokens at most: a longer run is cut
    there, which also bounds the work for a token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context, self._base = _last_text(tokenizer, prompt)
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Text that is certain now, often ""."""
        if token in self._tokenizer.special_ids:
            return ""
        self._pending = [*self._pending, token]
        if len(self._pending) == _MOST_HELD:
            return self._cut()
        if token in self._tokenizer.byte_ids:
            return ""
        known = self._context + self._pending
        text = self._tokenizer.decode(known)
        if text.endswith("\ufffd") or not text.startswith(self._base) or text == self._base:
            return ""
        piece = text[len(self._base) :]
        context = self._pending if self._tokenizer.decode(self._pending) else known[-_CONTEXT:]
        self._context, self._base, self._pending = context, self._tokenizer.decode(context), []
        return piece

    def finish(self) -> str:
        """What was held back; a character that is still open becomes U+FFFD."""
        piece, self._pending = self._text(self._pending), []
        return piece

    def _cut(self) -> str:
        """What is held back, but for the last tokens where they open a character (of at most four)."""
        ends = range(len(self._pending), len(self._pending) - 4, -1)
        end = next((n for n in ends if not self._text(self._pending[:n]).endswith("\ufffd")), ends[0])
        given, left = self._pending[:end], self._pending[end:]
        piece = self._text(given)
        self._context, self._base = _last_text(self._tokenizer, self._context + given)
        self._pending = left
        return piece

    def _text(self, ids: list[int]) -> str:
        """What the ids add to the base; their own text where they make the decoder change the base itself."""
        text = self._tokenizer.decode(self._context + ids)
        return text[len(self._base) :] if text.startswith(self._base) else self._tokenizer.decode(ids)


def _last_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[list[int], str]:
    """The last few ids of a prompt and their text; nothing when the prompt ends inside a character."""
    ids = [token for token in prompt[-_CONTEXT:] if token not in tokenizer.special_ids]
    text = tokenizer.decode(ids)
    if not ids or ids[-1] in tokenizer.byte_ids or text.endswith("\ufffd"):
        return [], ""
    return ids, text


class StopStrings:
    """Passes text on up to the stop string that is complete first (of those that end together, the longest)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Text that can be no part of a stop string."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        hold = next((n for n in range(min(len(text), self._longest - 1), 0, -1) if self._opens(text[-n:])), 0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """What was held back and stopped nothing."""
        text, self._held = self._held, ""
        return text

    def _opens(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)


class TextStream:
    """The text of one request as its tokens arrive; `stopped` once a stop string is complete."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def copy(self) -> TextStream:
        """The same stream at the same place; what is added to one does not show in the other."""
        made = copy(self)
        made._detokenizer, made._stops = copy(self._detokenizer), copy(self._stops)
        return made

    def add(self, token: int) -> str:
        return self._stops.add(self._detokenizer.add(token))

    def finish(self) -> str:
        """The rest of the text. It may hold a stop string, which then sets `stopped`."""
        if self.stopped:
            return ""
        text = self._stops.add(self._detokenizer.finish())
        return text + self._stops.finish()
