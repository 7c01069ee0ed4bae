"""Calibration and held-out texts: what is built in, users' files, and every way such a file can be wrong."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest

from plankiln.quantize import datasets
from plankiln.quantize.datasets import TextError, Texts, texts, token_ids
from plankiln.recipe import Text


def text(path: Path, **values: Any) -> Text:
    made = Text(path=path.name, **values)
    made._base = path.parent
    return made


def encode(sample: str) -> list[int]:
    return list(sample.encode())


def encode_chat(messages: list[Any]) -> list[int]:
    return encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


def test_built_in_sets_are_large_enough_and_different() -> None:
    calibration = texts(Text(), "calibration")
    held_out = texts(Text(), "held_out")
    (sample,) = calibration.samples
    assert len(sample) > 32 * 512 * 6
    assert len(held_out.samples) == 2
    assert all(len(text) > 6 * 512 * 6 for text in held_out.samples)
    shingles = [{part[i : i + 60] for i in range(len(part) - 60)} for part in (sample, *held_out.samples)]
    assert not shingles[0] & shingles[1]
    assert not shingles[0] & shingles[2]
    assert not shingles[1] & shingles[2]
    assert calibration.digest != held_out.digest
    assert texts(Text(), "calibration") == calibration


def test_every_built_in_text_has_its_licence_stated() -> None:
    folder = Path(datasets.__file__).parent / "text"
    readme = (folder / "README.md").read_text()
    for path in folder.glob("*.txt"):
        assert f"`{path.name}`" in readme
        assert path.stat().st_size < 200_000


def test_windows_are_consecutive_and_alternate_between_texts() -> None:
    two = Texts(("abcdefgh", "ABCD"), "here", "", True)
    assert token_ids(two, encode, encode_chat, 3, 3) == [encode("abc"), encode("ABC"), encode("def")]
    with pytest.raises(TextError, match=r"(?s)4 samples of at most 3 tokens.*asks for 5.*`samples: 4`"):
        token_ids(two, encode, encode_chat, 5, 3)


def test_text_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "my notes.jsonl"
    path.write_text("\ufeffone two\nthree")
    found = texts(text(path, kind="text"), "calibration")
    assert found.samples == ("one two\nthree",)
    assert found.windows
    assert found.source == str(path)
    path.write_text("one two\nthree!")
    assert texts(text(path, kind="text"), "held_out").digest != found.digest


def test_kind_is_what_the_recipe_says_wherever_the_file_lies(tmp_path: Path) -> None:
    """TensorRT-LLM recognised a dataset only when its path contained the right word."""
    row = json.dumps({"article": "some text"})
    for name in ("cnn_dailymail.txt", "renamed", "x.json"):
        path = tmp_path / name
        path.write_text(row)
        assert texts(text(path, kind="jsonl", field="article"), "calibration").samples == ("some text",)
        assert texts(text(path, kind="text"), "calibration").samples == (row,)


def test_rows_are_text_or_chat_messages(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "hello"}]
    path.write_text(json.dumps({"m": chat}) + "\n\n" + json.dumps({"m": "plain text"}) + "\n" + "not read\n")
    found = texts(text(path, kind="jsonl", field="m", samples=2), "calibration")
    assert found.samples == (chat, "plain text")
    assert token_ids(found, encode, encode_chat, 2, 9) == [encode("<user>hel"), encode("plain tex")]
    whole = found.digest
    path.write_text(path.read_text() + "more\n")
    assert texts(text(path, kind="jsonl", field="m", samples=2), "calibration").digest != whole


@pytest.mark.parametrize(
    ("content", "values", "message"),
    [
        (b"", {"kind": "text"}, r"the text is empty: .*file$"),
        (b" \n", {"kind": "text"}, r"the text is empty"),
        (b"", {"kind": "jsonl"}, r"the file has no rows: .*file$"),
        (b"good\nb\xffd", {"kind": "text"}, r"not UTF-8 \(byte 0xff\): .*file:2\n"),
        (b'{"text": "a"}\n{"text": "\xff"}', {"kind": "jsonl"}, r"not UTF-8 \(byte 0xff\): .*file:2\n"),
        (b'{"text": "a"}\n{"txt": "a"}', {"kind": "jsonl"}, r"no field `text`: .*file:2\nhint: its fields are `txt`"),
        (b"{}", {"kind": "jsonl", "field": "prompt"}, r"no field `prompt`: .*file:1\nhint: its fields are none"),
        (b'{"text": 7}', {"kind": "jsonl"}, r"`text` is neither text nor chat messages: .*file:1"),
        (b'{"text": [{"content": "a"}]}', {"kind": "jsonl"}, r"`text` is neither text nor chat messages"),
        (b'{"text": ""}', {"kind": "jsonl"}, r"`text` is empty: .*file:1"),
        (b"[1]", {"kind": "jsonl"}, r"not a JSON object: .*file:1"),
        (b'{"text": "a"}\n\nnope', {"kind": "jsonl"}, r"not JSON: .*file:3"),
    ],
)
def test_errors_name_the_row(tmp_path: Path, content: bytes, values: dict[str, Any], message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TextError, match=rf"(?ms){message}"):
        texts(text(path, **values), "calibration")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"cannot read the text \(No such file or directory\): .*nowhere"):
        texts(text(tmp_path / "nowhere", kind="text"), "calibration")


def test_huge_row_is_cut_at_max_tokens_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "short"}\n' + json.dumps({"text": "x" * 5000}) + "\n")
    recipe = text(path, kind="jsonl", samples=2)
    assert [len(row) for row in token_ids(texts(recipe, "calibration"), encode, encode_chat, 2, 100)] == [5, 100]
    monkeypatch.setattr(datasets, "MAX_ROW_BYTES", 1000)
    with pytest.raises(TextError, match=r"(?s)a row of more than .* MiB: .*rows.jsonl:2\nhint: cut the row"):
        texts(recipe, "calibration")


def test_row_without_tokens_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "a"}\n')
    found = texts(text(path, kind="jsonl", samples=2), "calibration")
    with pytest.raises(TextError, match=r"fewer than 2 tokens: .*rows.jsonl:2"):
        token_ids(found, encode, encode_chat, 2, 100)


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for which in ("calibration", "held_out"):
        assert token_ids(texts(Text(), which), encode, encode_chat, 16, 512)
