"""Tokenizer, chat template and special tokens of an HF directory, as its JSON files declare them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from plankiln.checkpoint.files import read_file, read_json
from plankiln.errors import CheckpointError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


class TokenizerFiles:
    """Lazily read, so that opening a checkpoint to look at its shapes needs no tokenizer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def json(self) -> bytes:
        path = self._directory / "tokenizer.json"
        if path.is_file():
            return read_file(path)
        convert = "`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` from transformers writes it"
        if (self._directory / "tokenizer.model").is_file():
            raise CheckpointError("no tokenizer.json, only tokenizer.model", str(self._directory), convert)
        raise CheckpointError("no tokenizer.json", str(self._directory), convert)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.json, str(self._directory / "tokenizer.json"))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """tokenizer_config.json, completed with the older special_tokens_map.json."""
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            path = self._directory / name
            if path.is_file():
                settings |= {key: value for key, value in read_json(path).items() if value is not None}
        return settings

    @cached_property
    def chat_template(self) -> str | None:
        path = self._directory / "chat_template.jinja"
        if path.is_file():
            try:
                return read_file(path).decode("utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError(f"not UTF-8 ({error})", str(path)) from None
        template = self.settings.get("chat_template")
        if template is None or isinstance(template, str):
            return template
        where = str(self._directory / "tokenizer_config.json")
        if not isinstance(template, list) or not all(isinstance(entry, dict) for entry in template):
            raise CheckpointError("`chat_template` is neither text nor a list of named templates", where)
        named = {entry.get("name"): entry.get("template") for entry in template}
        default = named.get("default")
        if not isinstance(default, str):
            names = ", ".join(f"`{name}`" for name in named)
            raise CheckpointError("no chat template is named `default`", where, f"it has {names}: rename one")
        return default

    def special_tokens(self, config: dict[str, Any]) -> dict[str, Any]:
        """What Checkpoint.special_tokens promises; a token that no file names is taken from the config's id."""
        result: dict[str, Any] = {}
        for name in SPECIAL_NAMES:
            token = self.settings.get(name)
            if isinstance(token, dict):
                token = token.get("content")
            declared = config.get(f"{name}_id")
            if token is None and type(declared) is int and declared >= 0:
                token = self.tokenizer.id_to_token(declared)
            if token is not None and not isinstance(token, str):
                raise CheckpointError(f"`{name}` is not text", str(self._directory / "tokenizer_config.json"))
            result[name] = token
            result[f"{name}_id"] = None if token is None else self.tokenizer.token_to_id(token)
        result["add_bos_token"] = self._adds_bos(result["bos_token_id"])
        return result

    def _adds_bos(self, bos: int | None) -> bool:
        declared = self.settings.get("add_bos_token")
        if isinstance(declared, bool):
            return declared and bos is not None
        return bos is not None and self.tokenizer.encode("").ids[:1] == [bos]


def load_tokenizer(text: bytes, where: str) -> Tokenizer:
    """Parse a tokenizer.json. Raises CheckpointError when `tokenizers` refuses it."""
    try:
        return Tokenizer.from_buffer(text)
    except Exception as error:  # tokenizers raises a bare Exception
        raise CheckpointError(f"tokenizer not understood ({error})", where) from None


def end_of_turn_ids(template: str | None, tokenizer: Tokenizer) -> set[int]:
    """Ids of the tokens with which the chat template ends a turn: well-known ones it writes and the vocabulary has."""
    ids = (tokenizer.token_to_id(token) for token in _TURN_ENDS if template is not None and token in template)
    return {token_id for token_id in ids if token_id is not None}


def eos_ids(value: object, where: str) -> set[int]:
    """`eos_token_id` of a config: absent, an id, or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"`eos_token_id` is neither an id nor a list of ids: `{value}`", where)
    return set(ids)
