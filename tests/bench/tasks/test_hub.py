"""A hub that does not answer is told at once, in one sentence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from keepset import KeepsetError

pytest.importorskip("datasets", reason='pip install "keepset[eval]"')

import datasets
from huggingface_hub import constants

from keepset.bench.tasks.data import HubData, load_records, loading
from keepset.hub import answers
from tests.bench.tasks.scaffold import examples_of, make_task


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    answers.cache_clear()
    yield
    answers.cache_clear()


@pytest.fixture
def address() -> Iterator[str]:
    """A hub's: it has nothing, but says so."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def unreachable(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)


def test_a_hub_that_answers_is_asked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    assert answers()
    with loading("a"):
        assert not constants.HF_HUB_OFFLINE


def test_one_that_does_not_answer_is_not_waited_for(unreachable: None) -> None:
    with loading("a"):
        assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_data_that_cannot_be_had_are_one_sentence(unreachable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeepsetError) as caught:
        load_records("gsm8k", None, HubData("no-such-owner/no-such-data", "main", "test"))
    assert str(caught.value).startswith("gsm8k cannot be loaded (Couldn't reach 'no-such-owner/no-such-data'")
    assert str(caught.value).endswith("or give a folder with gsm8k.jsonl as data.") and "\n" not in str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    "error, sentence",
    [
        (ValueError("First. Second.\nThird."), "a cannot be loaded (First): check"),
        (RuntimeError(), "a cannot be loaded (RuntimeError): check"),
        (
            ModuleNotFoundError("No module named 'x'"),
            "a needs a package that is missing (No module named 'x'): install it.",
        ),
        (KeepsetError("Our own."), "Our own."),
    ],
)
def test_whatever_goes_wrong_is_one_sentence(unreachable: None, error: Exception, sentence: str) -> None:
    with pytest.raises(KeepsetError) as caught, loading("a"):
        raise error
    assert str(caught.value).startswith(sentence)


def test_problems_come_from_the_hub_where_no_folder_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify", reason='pip install "keepset[eval]"')
    asked = []

    def load(path: str, name: str | None, split: str) -> list[dict[str, object]]:
        asked.append((path, name, split))
        return [{"Problem": "Find it.", "Answer": 204}, {"Problem": "Find it.", "Answer": None}]

    monkeypatch.setattr("keepset.hub.answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(KeepsetError, match=r"Maxwell-Jia/AIME_2024, item 1, lacks the field 'answer'"):
        examples_of(make_task("aime24"))
    assert asked == [("Maxwell-Jia/AIME_2024", None, "train")]
