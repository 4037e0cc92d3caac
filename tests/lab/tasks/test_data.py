"""Items of data sets: files as users write them, and a hub that may not answer."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset import KeepsetError
from keepset.lab.tasks.data import DataRecord, HubData, load_records, loading, read_records
from keepset.models import hub_answers
from tests.tiers import examples

JSON = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text())


@examples(100)
@given(items=st.lists(JSON, min_size=1, max_size=4), ascii_only=st.booleans())
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, items: list[Any], ascii_only: bool) -> None:
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps(item, ensure_ascii=ascii_only) for item in items]
    folder.joinpath("a.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    assert [row.fields for row in read_records(folder, "a")] == items


def test_empty_lines_do_not_count_but_line_numbers_do_and_a_missing_field_is_named(tmp_path: Path) -> None:
    tmp_path.joinpath("a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n \r\n{"a": "x\xe2\x80\xa8y"}\r\n')
    assert read_records(tmp_path, "a") == [
        DataRecord("a.jsonl, line 1,", {"a": 1}),
        DataRecord("a.jsonl, line 4,", {"a": "x\u2028y"}),
    ]
    row = DataRecord("a.jsonl, line 3,", {"x": None, "y": 0})
    assert row.first("y") == 0 and row.first("x", "y") == 0
    with pytest.raises(KeepsetError, match=r"^a.jsonl, line 3, lacks the field 'x' or 'z': it has 'x', 'y'\.$"):
        row.first("x", "z")
    with pytest.raises(KeepsetError, match="lacks the field 'z': it has no field"):
        DataRecord("b", {}).first("z")


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "There is no a.jsonl that can be read in '.*': put the data of a there"),
        (b"folder", "There is no a.jsonl that can be read"),
        (b"", "a.jsonl is empty: put one JSON object on each line."),
        (b"\n \n", "a.jsonl is empty"),
        ('{"a": "é"}'.encode("latin-1"), "a.jsonl is not encoded in UTF-8"),
        (b'{"a": 1}\n{"a": 2', "a.jsonl, line 2, is not a JSON object"),
        (b"[1, 2]", "a.jsonl, line 1, is not a JSON object"),
        (b"[" * 100_000, "a.jsonl, line 1, is not a JSON object"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content == b"folder":
        tmp_path.joinpath("a.jsonl").mkdir()
    elif content is not None:
        tmp_path.joinpath("a.jsonl").write_bytes(content)
    with pytest.raises(KeepsetError, match=sentence):
        read_records(tmp_path, "a")


# --- the hub


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A hub's: it has nothing, but says so. What is known of the hub is forgotten before and after."""
    datasets = pytest.importorskip("datasets", reason='pip install ".[eval]"')
    from huggingface_hub import constants

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub_answers.cache_clear()
    yield f"http://127.0.0.1:{server.server_port}"
    hub_answers.cache_clear()
    server.shutdown()
    server.server_close()


def offline() -> list[bool]:
    import datasets
    from huggingface_hub import constants

    return [constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE]


def test_a_hub_that_does_not_answer_is_not_waited_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with loading("a"):
        assert offline() == [True, True]
    assert offline() == [False, False]
    hub_answers.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    assert hub_answers()
    with loading("a"):
        assert offline() == [False, False]


def test_data_that_cannot_be_had_are_one_sentence(address: str) -> None:
    with pytest.raises(KeepsetError) as caught:
        load_records("gsm8k", None, HubData("no-such-owner/no-such-data", "main", "test"))
    assert str(caught.value).startswith("gsm8k cannot be loaded (Couldn't reach 'no-such-owner/no-such-data'")
    assert str(caught.value).endswith("or give a folder with gsm8k.jsonl as data.") and "\n" not in str(caught.value)


MISSING = "a needs a package that is missing (No module named {!r}): "


@pytest.mark.full
@pytest.mark.parametrize(
    "error, sentence",
    [
        (ValueError("First. Second.\nThird."), "a cannot be loaded (First): check"),
        (RuntimeError(), "a cannot be loaded (RuntimeError): check"),
        (ModuleNotFoundError("No module named 'x'", name="x"), MISSING.format("x") + "install it."),
        (
            ModuleNotFoundError("No module named 'langdetect'", name="langdetect.detector"),
            MISSING.format("langdetect") + 'run `pip install "lm-eval[ifeval]"`.',
        ),
        (KeepsetError("Our own."), "Our own."),
    ],
)
def test_whatever_goes_wrong_is_one_sentence(address: str, error: Exception, sentence: str) -> None:
    with pytest.raises(KeepsetError) as caught, loading("a"):
        raise error
    assert str(caught.value).startswith(sentence)
