"""Tokenizers rebuilt from GGUF metadata, against transformers' conversion and the sentencepiece library."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SMOLLM2, SMOLLM2_SHA256
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.checkpoint.gguf_tokenizer import GgufTokenizer
from plankiln.errors import CheckpointError


def random_strings(count: int, seed: int, specials: tuple[str, ...] = ()) -> list[str]:
    rng = random.Random(seed)

    def code_point(low: int, high: int) -> str:
        return chr(rng.randint(low, high))

    makers = [
        lambda: code_point(0x20, 0x7E),
        lambda: code_point(0x4E00, 0x9FFF),
        lambda: code_point(0x1F300, 0x1FAFF),
        lambda: code_point(0x300, 0x36F),
        lambda: code_point(0, 0x1F),
        lambda: rng.choice([" ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028"]),
        lambda: str(rng.randrange(10 ** rng.randrange(1, 7))),
        lambda: rng.choice(["'s", "'LL", "'t", "’s", "'Ve", "'re", "'d"]),
        lambda: "".join(rng.choice("etaoinshrdlu") for _ in range(rng.randrange(1, 10))).capitalize(),
        lambda: rng.choice("٣४½²Ⅷ๓①"),
        lambda: code_point(*rng.choice([(0x80, 0xD7FF), (0xE000, 0x10FFFF)])),
        lambda: rng.choice(specials or ("<", "|>")),
    ]
    return ["".join(rng.choice(makers)() for _ in range(rng.randrange(30))) for _ in range(count)]


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint(SMOLLM2, base=Path(), sha256=SMOLLM2_SHA256)


def test_smollm2_ids(smollm2: Checkpoint) -> None:
    """10,000 random strings. transformers' conversion knows no `smollm` pre-tokenizer and falls back to GPT-2's, which
    keeps ` ½` or the blanks before a digit together where the model was trained with every digit alone. So: equal to
    transformers wherever no numeric character occurs, and everywhere once its pre-tokenizer is the model's own."""
    from transformers import AutoTokenizer

    specials = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<|im_", "<empty_output>")
    texts = random_strings(10_000, 0, specials)
    ours = Tokenizer.from_buffer(smollm2.tokenizer_json)
    got = [encoding.ids for encoding in ours.encode_batch(texts)]

    theirs = AutoTokenizer.from_pretrained(smollm2.origin.parent, gguf_file=smollm2.origin.name)
    want = theirs(texts)["input_ids"]
    different = [text for text, a, b in zip(texts, got, want, strict=True) if a != b]
    assert all(any(character.isnumeric() for character in text) for text in different)
    assert sum(not any(character.isnumeric() for character in text) for text in texts) > 1000

    backend = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert got == [encoding.ids for encoding in backend.encode_batch(texts)]

    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    vocabulary = ours.get_vocab()
    spellable = [all(byte in vocabulary for piece, _ in spell(text) for byte in piece) for text in texts]
    assert sum(spellable) > 5000, "21 bytes are no token of this model: the trainer never saw them"
    for text, ids, whole in zip(texts, got, spellable, strict=True):
        assert not whole or ours.decode(ids, skip_special_tokens=False) == text


def test_smollm2_splits_digits_alone(smollm2: Checkpoint) -> None:
    ours = Tokenizer.from_buffer(smollm2.tokenizer_json)
    assert ours.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]
    assert ours.encode("x ½").tokens == ["x", "Ġ", "Â½"]


def test_smollm2_template_and_ends(smollm2: Checkpoint) -> None:
    assert smollm2.chat_template is not None
    assert "<|im_end|>" in smollm2.chat_template
    assert smollm2.eos_token_ids == (2,)
    special = smollm2.special_tokens
    assert (special["bos_token"], special["bos_token_id"], special["add_bos_token"]) == ("<|im_start|>", 1, False)
    assert (special["eos_token"], special["unk_token"]) == ("<|im_end|>", "<|endoftext|>")


CORPUS = random_strings(3000, 1) + ["It's 12,345 o'clock; we'll meet at 10:30!\n\n  def f(x):\n\treturn x"] * 40


@functools.cache
def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE of 600 tokens, trained on CORPUS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocab = tokenizer.get_vocab()
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    return sorted(vocab, key=lambda token: vocab[token]), merges


def byte_level_metadata(split: str, **changes: Any) -> dict[str, Any]:
    """The trained vocabulary and three more tokens as llama.cpp would write them; None removes a key."""
    tokens, merges = trained()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": [*tokens, "[tool]", "a b", "[PAD602]"],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, *[1] * 598, 4, 4, 5],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def built(metadata: dict[str, Any]) -> Tokenizer:
    return GgufTokenizer(metadata, Path("x.gguf")).build()


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_pre_tokenizers_cut_where_transformers_does(pre: str) -> None:
    """Where a text is cut, against transformers' tables (which come from the models' own tokenizer.json)."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    metadata = byte_level_metadata(pre)
    renamed = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    theirs, _ = convert_gguf_tokenizer(
        "llama", renamed | {"tokenizer_type": "gpt2", "pre_tokenizer_type": renamed["pre"]}
    )
    ours = built(metadata)
    for text in CORPUS:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


def test_known_cuts() -> None:
    text = "It's 12345 we'LL naïve\n\n  x/HTML5"
    want = {
        "gpt-2": ["It", "'s", " 12345", " we", "'", "LL", " naïve", "\n\n ", " x", "/", "HTML", "5"],
        "smollm": ["It", "'s", " ", *"12345", " we", "'", "LL", " naïve", "\n\n ", " x", "/", "HTML", "5"],
        "llama-bpe": ["It", "'s", " ", "123", "45", " we", "'LL", " naïve", "\n\n", " ", " x", "/HTML", "5"],
        "qwen2": ["It", "'s", " ", *"12345", " we", "'LL", " naïve", "\n\n", " ", " x", "/HTML", "5"],
        "tekken": ["It", "'s", " ", *"12345", " we", "'LL", " naïve", "\n\n", " ", " x", "/HTML", "5"],
    }
    decoder = decoders.ByteLevel()
    for pre, pieces in want.items():
        cut = built(byte_level_metadata(pre)).pre_tokenizer.pre_tokenize_str(text)
        assert [decoder.decode([piece]) for piece, _ in cut] == pieces, pre


def test_qwen2_normalises_to_nfc() -> None:
    composed = built(byte_level_metadata("gpt-2")).encode("é").ids
    assert built(byte_level_metadata("qwen2")).encode("e\u0301").ids == composed


def test_llama3_takes_a_whole_word_before_merging() -> None:
    tokens = ["<s>", "</s>", "a", "b", "c", "ab", "abc"]
    metadata = byte_level_metadata("llama-bpe", tokens=tokens, merges=["a b"], token_type=[3, 3, 1, 1, 1, 1, 1])
    assert built(metadata).encode("abc", add_special_tokens=False).tokens == ["abc"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert built(metadata).encode("abc").tokens == ["ab", "c"]


def test_added_tokens_and_bos() -> None:
    tokenizer = built(byte_level_metadata("gpt-2", add_bos_token=True))
    assert tokenizer.get_vocab_size() == 603
    assert tokenizer.encode("x<s>[tool]a b").tokens == ["<s>", "x", "<s>", "[tool]", "a b"]
    assert tokenizer.encode("[tool]", add_special_tokens=False).ids == [600]
    assert tokenizer.decode([0, 600]) == "[tool]"
    defaults = {"gpt-2": False, "smollm": False, "qwen2": False, "llama-bpe": True, "tekken": True}
    for pre, adds in defaults.items():
        source = GgufTokenizer(byte_level_metadata(pre), Path("x"))
        assert source.special_tokens()["add_bos_token"] is adds
    without = GgufTokenizer(byte_level_metadata("llama-bpe", bos_token_id=None), Path("x"))
    assert without.special_tokens()["add_bos_token"] is False


def test_declared_ends() -> None:
    metadata = byte_level_metadata("gpt-2", eot_token_id=5, eom_token_id=7)
    assert GgufTokenizer(metadata, Path("x")).declared_ends() == {1, 5, 7}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pre": "viking"}, r"pre-tokenizer `viking` is not supported[^$]*gpt-2, smollm, llama-bpe"),
        ({"pre": None}, "pre-tokenizer `default` is not supported"),
        ({"model": "bert"}, "tokenizer model `bert` is not supported"),
        ({"tokens": ["a", 1]}, "not a list of texts"),
        ({"tokens": []}, "not a list of texts"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "token `a` occurs twice"),
        ({"merges": ["a b c"]}, "an entry that is not a pair"),
        ({"merges": ["a zzzz"]}, "vocabulary not understood"),
        ({"merges": None}, "metadata `tokenizer.ggml.merges` is missing"),
        ({"token_type": [1]}, "does not give each token a type"),
        ({"bos_token_id": -1}, "is not the id of a token: `-1`"),
        ({"add_bos_token": 1}, "has the wrong type int"),
    ],
)
def test_vocabularies_that_are_not_understood(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        built(byte_level_metadata("gpt-2", **changes))


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    lines = [line for text in CORPUS for line in re.sub(r"[^ -~é٣½]", "", text).split("\n") if line.strip()]
    (folder / "corpus.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=700,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def sentencepiece_metadata(model: Any) -> dict[str, Any]:
    size = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(size)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_ids_equal_the_library(sentencepiece_model: Any) -> None:
    metadata = sentencepiece_metadata(sentencepiece_model)
    ours = built(metadata)
    texts = [text for text in random_strings(4000, 2, ("▁", "hello world")) if "\0" not in text]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == sentencepiece_model.encode(text), repr(text)
        if "▁" not in text:
            assert ours.decode(ids) == text
    assert ours.encode("hi").ids[0] == 1, "llama.cpp's SPM vocabularies add BOS unless they say otherwise"
    assert ours.encode("hi</s>", add_special_tokens=False).ids[-1] == 2


def test_sentencepiece_without_prefix_space_and_faults(sentencepiece_model: Any) -> None:
    metadata = sentencepiece_metadata(sentencepiece_model)
    bare = built(metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert not bare.encode("hi", add_special_tokens=False).tokens[0].startswith("▁")
    assert bare.decode(bare.encode(" hi").ids) == " hi"
    for changes, match in [
        ({"scores": [0.0]}, "does not give each token a score"),
        ({"scores": None}, r"scores` is missing"),
        ({"remove_extra_whitespaces": True}, "removes extra whitespace"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            built(metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


def test_added_token_ids_are_the_vocabulary_s() -> None:
    """A control token written in characters outside the byte alphabet keeps its id."""
    metadata = byte_level_metadata("gpt-2")
    metadata["tokenizer.ggml.tokens"][0] = "<｜begin▁of▁sentence｜>"
    tokenizer = built(metadata)
    assert tokenizer.encode("<｜begin▁of▁sentence｜>").ids == [0]
    assert tokenizer.get_vocab_size() == 603
