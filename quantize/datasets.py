"""Text to calibrate with and to measure on: built in, or the user's own file. Nothing is ever downloaded.

A text file is one long text, cut into consecutive windows of tokens; a row of a jsonl file is one sample.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Literal

from plankiln.errors import PlankilnError
from plankiln.recipe import Text

Message = Mapping[str, Any]
Sample = str | list[Message]
MAX_TEXT_BYTES = 64 << 20
MAX_ROW_BYTES = 8 << 20
DEFAULT_FIELD = "text"
_BUILT_IN = {"calibration": ("calibration.txt",), "held_out": ("held_out_a.txt", "held_out_b.txt")}


class TextError(PlankilnError):
    """A text to calibrate with or to measure on is missing, damaged or too short."""


@dataclass(frozen=True)
class Texts:
    """Samples as text or chat messages, and where they come from.

    source: a file, or `built-in calibration` and the like. digest: sha256 (hex) of the bytes they were read from.
    windows: whether the samples are long texts to be cut into windows of tokens; otherwise each is used once.
    """

    samples: tuple[Sample, ...]
    source: str
    digest: str
    windows: bool


def texts(text: Text, which: Literal["calibration", "held_out"]) -> Texts:
    """Read the samples that `text` describes; `which` of the built-in sets, held_out being two texts.

    Of a jsonl file the first `text.samples` rows are read; the digest is of the whole file. Raises TextError, which
    names the row, when the file is missing, empty or not UTF-8, or a row is too long, no JSON or lacks its field.
    """
    path = text.file
    if path is None:
        return _built_in(which)
    try:
        with path.open("rb") as file:
            if text.kind == "text":
                return _read_text(file, path)
            return _read_rows(file, path, text.field or DEFAULT_FIELD, text.samples)
    except OSError as error:
        raise TextError(f"cannot read the text ({error.strerror})", str(path)) from None


def token_ids(
    texts: Texts,
    encode: Callable[[str], list[int]],
    encode_chat: Callable[[list[Message]], list[int]],
    samples: int,
    max_tokens: int,
) -> list[list[int]]:
    """The first `samples` windows or rows as token ids, each of 2 to `max_tokens` tokens.

    Long texts are cut into consecutive windows, taken from each text in turn; a row is cut at `max_tokens`. Raises
    TextError when there are fewer than `samples`, or a row has fewer than 2 tokens.
    """
    if texts.windows:
        ids = [encode(sample) for sample in texts.samples if isinstance(sample, str)]
        cut = [[row[i : i + max_tokens] for i in range(0, len(row) - 1, max_tokens)] for row in ids]
        longest = max(map(len, cut))
        found = [row[i] for i in range(longest) for row in cut if i < len(row) and len(row[i]) > 1]
    else:
        found = []
        for number, sample in enumerate(texts.samples[:samples], 1):
            row = (encode(sample) if isinstance(sample, str) else encode_chat(sample))[:max_tokens]
            if len(row) < 2:
                hint = "a sample needs at least 2 tokens: remove the row, or raise `max_tokens`"
                raise TextError("row of fewer than 2 tokens", f"{texts.source}:{number}", hint)
            found.append(row)
    if len(found) < samples:
        what = f"{len(found)} samples of at most {max_tokens} tokens, but the recipe asks for {samples}"
        hint = f"write `samples: {len(found)}`, or a smaller `max_tokens`" if found else "use a longer text"
        raise TextError(what, texts.source, hint)
    return found[:samples]


def _built_in(which: Literal["calibration", "held_out"]) -> Texts:
    folder = resources.files("plankiln.quantize") / "text"
    data = [(folder / name).read_bytes() for name in _BUILT_IN[which]]
    digest = hashlib.sha256(b"\0".join(data)).hexdigest()
    return Texts(tuple(part.decode() for part in data), f"built-in {which.replace('_', '-')}", digest, True)


def _read_text(file: BinaryIO, path: Path) -> Texts:
    data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        hint = "cut the file: calibration reads a few hundred kilobytes of it"
        raise TextError(f"a text of more than {MAX_TEXT_BYTES >> 20} MiB", str(path), hint)
    if not data.strip():
        raise TextError("the text is empty", str(path))
    try:
        sample = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TextError(_not_utf8(error), f"{path}:{line}", _AS_UTF8) from None
    return Texts((sample,), str(path), hashlib.sha256(data).hexdigest(), True)


def _read_rows(file: BinaryIO, path: Path, field: str, wanted: int) -> Texts:
    digest = hashlib.sha256()
    samples: list[Sample] = []
    number = 0
    while len(samples) < wanted and (line := file.readline(MAX_ROW_BYTES + 1)):
        number += 1
        digest.update(line)
        where = f"{path}:{number}"
        if len(line) > MAX_ROW_BYTES:
            hint = "cut the row: only its first `max_tokens` tokens are used"
            raise TextError(f"a row of more than {MAX_ROW_BYTES >> 20} MiB", where, hint)
        if line.strip():
            samples.append(_sample(line, where, field))
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    if not samples:
        raise TextError("the file has no rows", str(path))
    return Texts(tuple(samples), str(path), digest.hexdigest(), False)


def _sample(line: bytes, where: str, field: str) -> Sample:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TextError(_not_utf8(error), where, _AS_UTF8) from None
    except (ValueError, RecursionError):
        raise TextError("row is not JSON", where, "jsonl has one JSON object on each line") from None
    if not isinstance(row, dict):
        raise TextError("row is not a JSON object", where, 'write rows such as {"text": "…"}')
    if field not in row:
        fields = ", ".join(f"`{key[:40]}`" for key in list(row)[:8]) or "none"
        raise TextError(f"row has no field `{field}`", where, f"its fields are {fields}: name one with `field`")
    value = row[field]
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(part) for part in value):
        return value
    what = f"field `{field}` is empty" if not value else f"field `{field}` is neither text nor chat messages"
    raise TextError(what, where, 'messages are a list such as [{"role": "user", "content": "…"}]')


def _is_message(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("role"), str) and "content" in part


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x})"


_AS_UTF8 = "save the file as UTF-8"
