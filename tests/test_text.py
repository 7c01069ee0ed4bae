"""Tokenizer habits, chat templates, incremental decoding and stop strings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import byte_fallback, byte_level

from plankiln.chat_template import ChatTemplate
from plankiln.errors import BundleError, RequestError
from plankiln.runtime.text import Detokenizer, StopStrings, TextStream, Tokenizer

BYTES = byte_level(["hello", " world"])
FALLBACK = byte_fallback()
TOKENIZERS = [BYTES, FALLBACK]
CHATML = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = ["déjà vu", "a b", "😀👍🏽", "中文字", "\ufffd", " ", "\n", "a\u0301"]


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_decoded_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.sampled_from(WORDS) | st.text(max_size=4)).map("".join))
def test_valid_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(first=st.lists(st.sampled_from(WORDS)).map("".join), second=st.lists(st.sampled_from(WORDS)).map("".join))
def test_text_continues_its_prompt(tokenizer: Tokenizer, first: str, second: str) -> None:
    ids = tokenizer.encode(first + " b " + second)
    for cut in range(len(ids) + 1):
        prompt, rest = ids[:cut], ids[cut:]
        if cut and (prompt[-1] in tokenizer.byte_ids or tokenizer.decode(prompt).endswith("\ufffd")):
            continue  # the prompt ends inside a character
        assert tokenizer.decode(prompt) + "".join(streamed(tokenizer, rest, prompt)) == tokenizer.decode(ids)


def test_character_appears_with_its_last_byte() -> None:
    ids = BYTES.encode("é")
    assert len(ids) == 2
    assert streamed(BYTES, ids) == ["", "é", ""]
    assert streamed(BYTES, ids[:1]) == ["", "\ufffd"]


def test_special_and_unknown_ids_add_no_text() -> None:
    hello = BYTES.encode("hello")
    eos = BYTES.encode("</s>")
    assert "".join(streamed(BYTES, [*eos, *hello, *eos * 50, *hello, 10**6])) == "hellohello"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_text_is_not_held_back_for_ever(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tokens, a token costs the decoding of a bounded number of them."""
    decoded: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int]) -> str:
        decoded.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    broken = tokenizer.encode("é")[-1]
    spaces = tokenizer.encode("a ")[-1]
    for ids in ([broken] * 2000, [spaces] * 2000, [10**6] * 2000, tokenizer.encode("😀" * 500)):
        pieces = streamed(tokenizer, ids)
        assert max(decoded) <= 512 or max(decoded) == len(ids)
        whole = decode(tokenizer, ids)
        assert "".join(pieces) == whole
        shown = [index for index, piece in enumerate(pieces) if piece]
        assert not whole or max(b - a for a, b in zip([-1, *shown], shown, strict=False)) <= 256


def test_a_decoder_that_changes_earlier_text_does_not_stop_the_stream() -> None:
    class Shifty(Tokenizer):
        """One token turns all text before it to capitals."""

        def decode(self, ids: Sequence[int]) -> str:
            text = "".join(f"a{i} " for i in ids)
            return text.upper() if 99 in ids else text

    ids = [*range(10, 99), 99, *range(100, 500)]
    pieces = streamed(Shifty(BYTES._tokenizer.to_str().encode()), ids)
    assert "".join(pieces).lower() == "".join(f"a{i} " for i in ids)
    assert pieces.count("") == 256


STOPS = st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(text=st.text("ab-c", max_size=24), stops=STOPS, data=st.data())
def test_stop_strings_do_not_depend_on_the_split(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    watcher, seen, out = StopStrings(stops), "", ""
    for piece in pieces:
        seen, out = seen + piece, out + watcher.add(piece)
        if watcher.stopped:
            break
        claimed = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert out == seen[: len(seen) - claimed]
    out += watcher.finish()
    ends = [m.end() for n in range(len(text)) for s in stops if (m := re.compile(re.escape(s)).match(text, n))]
    assert watcher.stopped == bool(ends)
    if ends:
        end = min(ends)
        assert out == text[: min(end - len(s) for s in stops if text[:end].endswith(s))]
    else:
        assert out == text


def test_stop_string_across_tokens_is_never_leaked_in_part() -> None:
    ids = FALLBACK.encode("a b💥stop b")
    stream = TextStream(FALLBACK, [], ["💥stop"])
    out = ""
    for token in ids:
        out += stream.add(token)
        if stream.stopped:
            break
    assert stream.stopped
    assert out + stream.finish() == "a b"


def test_stop_string_in_held_back_bytes_is_found_at_the_end() -> None:
    ids = FALLBACK.encode("b中")
    stream = TextStream(FALLBACK, [], ["中"])
    out = "".join(map(stream.add, ids))
    assert not stream.stopped
    assert out + stream.finish() == "b"
    assert stream.stopped


def test_template_owns_bos() -> None:
    """users-met 45: the template writes BOS, and so does the tokenizer for plain prompts; it is there once."""
    tokenizer = byte_level(chat_template=CHATML, add_bos=True)
    bos = tokenizer.encode("x")[0]
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert chat.count(bos) == 1
    assert chat[0] == bos
    assert tokenizer.encode("<s><|user|>hi<|assistant|>") == chat
    assert tokenizer.encode("hi").count(bos) == 1
    assert byte_level().encode("hi").count(bos) == 0
    without = byte_level(chat_template=CHATML.replace("{{ bos_token }}", ""), add_bos=True)
    assert without.encode_chat([{"role": "user", "content": "hi"}]) == chat[1:]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<é>"\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "<é>!"),
        ("{{ tools is none }}{{ extra }}{{ eos_token }}", "True7</s>"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
    ],
)
def test_template_language(template: str, expected: str) -> None:
    tokenizer = byte_level(chat_template=template)
    ids = tokenizer.encode_chat([{"role": "user", "content": "<é>"}], extra=7)
    assert tokenizer._tokenizer.decode(ids, skip_special_tokens=False) == expected


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LONG_TEMPLATE = """{%- set ns = namespace(n=0) -%}
{% for m in messages %}
    {%- if m.content is string and loop.first and m.role != 'system' %}
{{ '<|user|>' ~ (m.content | trim) }}
    {%- elif m.role == 'system' %}
{{ m | tojson(indent=2) }} {{- strftime_now('%Y') }}
    {%- else %}
        {%- for part in m.content %}{% if part == 'c' %}{% continue %}{% endif %}{{ part | upper }}{%- endfor %}
    {% endif %}
    {%- set ns.n = ns.n + 1 %}
{% endfor %}
{{ ns.n }}{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{% generation %}{{ messages[-1].content }}{% endgeneration %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


@pytest.mark.parametrize("template", [CHATML, LONG_TEMPLATE])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_in_transformers(template: str, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "user", "content": " <é> "},
        {"role": "system", "content": "s"},
        {"role": "user", "content": "abcd"},
    ]
    names: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, tools=tools, **names
    )[0]
    assert ChatTemplate(template, names).render(messages, add_generation_prompt=True, tools=tools) == theirs[0]


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (CHATML, [{"role": "tool", "content": "x"}], "no tools"),
        (CHATML, [], "at least one message"),
        (CHATML, "hello", "list of at least one message"),
        (CHATML, [{"content": "x"}], r"messages\[0\]"),
        (CHATML, ["hello"], r"messages\[0\]"),
        (CHATML, [{"role": "user", "content": "\ud800"}], "lone surrogate"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user"}], "unsafe"),
        ("{{ messages.append(1) }}", [{"role": "user"}], "unsafe|not safely"),
        ("{{ 1 / 0 }}", [{"role": "user"}], "division"),
        (None, [{"role": "user"}], "no chat template"),
    ],
)
def test_bad_conversations(template: str | None, messages: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        byte_level(chat_template=template).encode_chat(messages)  # type: ignore[arg-type]


def test_damaged_files_are_bundle_errors(tmp_path: object) -> None:
    with pytest.raises(BundleError, match="not a tokenizer"):
        Tokenizer(b"{}")
    with pytest.raises(BundleError, match="cannot read the tokenizer"):
        Tokenizer.from_file(f"{tmp_path}/tokenizer.json")
    with pytest.raises(BundleError, match="not a Jinja template"):
        ChatTemplate("{% if %}", {}).compile()
    with pytest.raises(BundleError, match="wants a BOS token"):
        byte_level(add_bos=True, special_tokens={})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a\n{% if %}", r"\(Expected an expression, got 'end of statement block'\): chat template, line 2"),
        ("{{ x|nosuch }}", "No filter named 'nosuch'"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "recursion"),
        ("{{ " + "9" * 5000 + " }}", "4300 digits"),
        ("{% for i in x %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
    ],
)
def test_a_template_that_is_no_template_is_named_when_it_is_used(source: str, said: str) -> None:
    tokenizer = byte_level(chat_template=source)
    assert tokenizer.encode("hello")
    with pytest.raises(BundleError, match=f"not a Jinja template .*{said}"):
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    "expression",
    ['"a" * 10**10', "10**10**10", "[1] * 10**10", '10**10 * "a"', "9 ** (10**9)", '"%99999999999d" % 1'],
)
def test_a_template_s_bombs_do_not_go_off(expression: str) -> None:
    """Not when it is compiled, where nothing is computed, and not in the text."""
    for source in (f"{{{{ {expression} }}}}", f"{{% if {expression} %}}{{% endif %}}"):
        template = ChatTemplate(source, {})
        template.compile()
        with pytest.raises(RequestError, match="refused the messages"):
            template.render([{"role": "user"}])


def test_a_text_without_end_is_refused() -> None:
    template = ChatTemplate("{% for i in range(100000) %}{{ 'ab' * 1000 }}{% endfor %}", {})
    with pytest.raises(RequestError, match="the text is longer than 16777216 characters"):
        template.render([{"role": "user"}])


def test_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        BYTES.encode("ab\udc80")
