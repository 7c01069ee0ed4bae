"""The tokenizer a GGUF file describes, rebuilt with `tokenizers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from plankiln.checkpoint.tokenizer_files import SPECIAL_NAMES
from plankiln.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_GGUF_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SPM_DEFAULT_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_BOS_BY_DEFAULT = _WHOLE_WORDS_FIRST
PRE_TOKENIZERS = ("gpt-2", "smollm", *_SPLITS)
"""The values of `tokenizer.ggml.pre` that are understood for byte-level BPE."""


class GgufTokenizer:
    """Reads `tokenizer.*` metadata. Raises CheckpointError for anything it does not know exactly."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path
        self.kind = self._get("model", str)
        if self.kind not in ("gpt2", "llama"):
            self._fail(f"tokenizer model `{self.kind}` is not supported", "supported: gpt2 (byte-level BPE), llama")
        self.tokens: list[str] = self._get("tokens", list)
        if not all(isinstance(token, str) for token in self.tokens) or not self.tokens:
            self._fail("`tokenizer.ggml.tokens` is not a list of texts")

    @property
    def chat_template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            self._fail("`tokenizer.chat_template` is not text")
        return template

    def special_tokens(self) -> dict[str, Any]:
        """See Checkpoint.special_tokens."""
        result: dict[str, Any] = {}
        for name in SPECIAL_NAMES:
            token_id = self._id(_GGUF_IDS[name])
            result[name] = None if token_id is None else self.tokens[token_id]
            result[f"{name}_id"] = token_id
        adds_bos = self._get("add_bos_token", bool, self.kind == "llama" or self._pre in _BOS_BY_DEFAULT)
        result["add_bos_token"] = adds_bos and result["bos_token_id"] is not None
        return result

    def declared_ends(self) -> set[int]:
        """End of sequence, end of turn and end of message, as far as the metadata names them."""
        ids = (self._id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        return {token_id for token_id in ids if token_id is not None}

    def build(self) -> Tokenizer:
        """The tokenizer. Encoding with special tokens puts BOS first where the file asks for it."""
        vocab = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(vocab) != len(self.tokens):
            twice = next(token for token_id, token in enumerate(self.tokens) if vocab[token] != token_id)
            self._fail(f"token `{twice}` occurs twice in the vocabulary")
        try:
            tokenizer = self._byte_level(vocab) if self.kind == "gpt2" else self._sentencepiece(vocab)
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises a bare Exception
            self._fail(f"vocabulary not understood ({error})")
        self._add_tokens(tokenizer)
        special = self.special_tokens()
        if special["add_bos_token"]:
            bos = (special["bos_token"], special["bos_token_id"])
            template = processors.TemplateProcessing(f"{bos[0]} $A", f"{bos[0]} $A {bos[0]} $B", [bos])
            tokenizer.post_processor = template
        return tokenizer

    def _byte_level(self, vocab: dict[str, int]) -> Tokenizer:
        if self._pre not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            self._fail(f"pre-tokenizer `{self._pre}` is not supported", f"known `tokenizer.ggml.pre`: {known}")
        merges = [tuple(merge.split(" ")) for merge in self._get("merges", list)]
        if any(len(merge) != 2 for merge in merges):
            self._fail("`tokenizer.ggml.merges` has an entry that is not a pair")
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=self._pre in _WHOLE_WORDS_FIRST))
        if self._pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        if self._pre in _SPLITS:
            first = pre_tokenizers.Split(Regex(_SPLITS[self._pre]), "isolated")
            steps = [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        else:
            digits = [pre_tokenizers.Digits(individual_digits=True)] if self._pre == "smollm" else []
            steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self, vocab: dict[str, int]) -> Tokenizer:
        if self._get("remove_extra_whitespaces", bool, False):
            self._fail("a tokenizer that removes extra whitespace is not supported")
        unknown = self._id("unknown_token_id")
        if unknown is None:
            self._fail("the tokenizer has no unknown token")
        merges = self._merges_from_scores(vocab)
        model = models.BPE(vocab, merges, unk_token=self.tokens[unknown], fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(model)
        prefix = self._get("add_space_prefix", bool, True)
        prepend: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _merges_from_scores(self, vocab: dict[str, int]) -> list[tuple[str, str]]:
        """Sentencepiece merges the pair whose joined piece has the highest score; as a list, best first."""
        scores = self._get("scores", list)
        if len(scores) != len(self.tokens) or not all(type(score) is float and score == score for score in scores):
            self._fail("`tokenizer.ggml.scores` does not give each token a score")
        ranked = []
        for token, token_id in vocab.items():
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocab and right in vocab:
                    ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
        ranked.sort()
        return [(left, right) for *_, left, right in ranked]

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        types = self._get("token_type", list, [1] * len(self.tokens))
        if len(types) != len(self.tokens):
            self._fail("`tokenizer.ggml.token_type` does not give each token a type")
        special = {_CONTROL, _UNKNOWN}
        pairs = list(zip(self.tokens, types, strict=True))
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in pairs if k in special])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in pairs if k == _USER_DEFINED])

    @property
    def _pre(self) -> str:
        return str(self._get("pre", str, "default"))

    def _id(self, key: str) -> int | None:
        default = _SPM_DEFAULT_IDS.get(key) if self.kind == "llama" else None
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            self._fail(f"`tokenizer.ggml.{key}` is not the id of a token: `{value}`")
        return value

    def _get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind):
            fault = "is missing" if value is None else f"has the wrong type {type(value).__name__}"
            self._fail(f"metadata `tokenizer.ggml.{key}` {fault}")
        return value

    def _fail(self, what: str, hint: str = "") -> NoReturn:
        raise CheckpointError(what, str(self._path), hint)
