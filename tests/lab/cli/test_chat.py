"""`keepset chat`: answers of the model's own, and what is said of the cache after each."""

import io
import re
from typing import Any

import pytest

from tests.hf.models import generate
from tests.lab.cli.conftest import Run, check_refused

WHOLE = "streaming_llm(keep=1.0, turns=True)"
STATUS = re.compile(
    r"(\d+) tokens of the history computed, (\d+) not again, (\d+) dropped; ([\d.]+) MB of keys and values in 16 "
    r"bits, of ([\d.]+) MB in a full cache; [\d.]+ MB allocated"
)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put lines where a user types."""
    return lambda *lines: monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def answer(tiny: tuple[Any, Any], history: list[dict[str, str]]) -> str:
    """The model's own answer to a whole history."""
    model, tokenizer = tiny
    ids = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = generate(model, ids["input_ids"], max_new_tokens=6).sequences[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(output, skip_special_tokens=True))


def test_a_chat_answers_as_the_model_does_and_says_what_it_computed(run: Run, tiny: Any, say: Any) -> None:
    say("Who are you?", "/again", "And who am I?", "/undo", "What then?", "", "never read")
    done = run("chat", "--recipe", WHOLE, "--system", "Be brief.", "--output-tokens", "6")
    assert done.code == 0
    history = [{"role": "system", "content": "Be brief."}]
    expected = []
    for text in ("Who are you?", "And who am I?", "What then?"):
        asked = [*history, {"role": "user", "content": text}]
        expected.append(answer(tiny, asked))
        if text != "And who am I?":
            history = [*asked, {"role": "assistant", "content": expected[-1]}]
    first, second, third = expected
    assert done.out == "".join(f"{text}\n" for text in (first, first, second, third))
    figures = [tuple(map(float, found)) for found in STATUS.findall(done.err)]
    assert len(figures) == 4
    assert figures[0][1] == 0 and figures[1][0] == 1 and figures[1][1] == figures[0][0] - 1
    assert all(reused > 0 for _, reused, *_ in figures[1:])


def test_a_share_of_a_chat_stays(run: Run, tiny: Any, say: Any) -> None:
    say(*("Tell me more about it, and do not stop before all was said. " * 28 for _ in range(4)))
    done = run("chat", "--recipe", "snapkv(window=8, bytes=0.25, turns=True)", "--output-tokens", "4")
    assert done.code == 0
    *_, held, full = map(float, STATUS.findall(done.err)[-1])
    assert held < 0.6 * full


def test_without_a_recipe_the_default_is_named(run: Run, tiny: Any, say: Any) -> None:
    say("/again")
    done = run("chat")
    assert (done.code, done.out) == (0, "")
    assert "the default is taken: quantized(pool(snapkv), bytes=0.25, short=256, turns=True)." in done.err
    assert "Nothing was said yet: write a message." in done.err


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (("--recipe", "snapkv"), "does not say how much to keep"),
        (("--output-tokens", "0"), "--output-tokens 0"),
        (("--system", " "), "The system message is empty"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    run: Run, unloaded: None, words: tuple[str, ...], because: str
) -> None:
    check_refused(run, "chat", *words, because=because)


def test_a_recipe_that_does_not_compress_between_turns_is_refused(run: Run, tiny: Any) -> None:
    check_refused(run, "chat", "--recipe", "snapkv(keep=0.5)", because="add turns=True to it")
