"""Small tokenizers, built here: byte-level BPE, and SentencePiece-like BPE with byte fallback."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from plankiln.runtime.text import Tokenizer

SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]


def byte_level(words: Sequence[str] = (), **habits: object) -> Tokenizer:
    """Every byte is a token, and so is each of `words` (added whole, not special). Ids: SPECIALS, bytes, words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(SPECIALS + alphabet)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return _finish(raw, words, habits)


def byte_fallback(words: Sequence[str] = ("▁a", "b", "▁", "é", "▁déjà"), **habits: object) -> Tokenizer:
    """Llama 2's kind: pieces with ▁ for a space, `<0x..>` for the bytes of what has no piece, first space stripped."""
    pieces = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    raw = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(raw, (), habits)


def _finish(raw: tokenizers.Tokenizer, words: Sequence[str], habits: dict[str, object]) -> Tokenizer:
    raw.add_special_tokens(SPECIALS)
    raw.add_tokens(list(words))
    names = {"special_tokens": {"bos_token": "<s>", "eos_token": "</s>"}}
    return Tokenizer(raw.to_str().encode(), **(names | habits))  # type: ignore[arg-type]
