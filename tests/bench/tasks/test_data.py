from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset import KeepsetError
from keepset.bench.tasks.data import DataRecord, read_records

JSON = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text())


@given(items=st.lists(JSON, min_size=1, max_size=4), ascii_only=st.booleans())
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, items: list[object], ascii_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps(item, ensure_ascii=ascii_only) for item in items]
    folder.joinpath("a.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    assert [row.fields for row in read_records(folder, "a")] == items


def test_empty_lines_and_byte_order_marks_do_not_count_but_line_numbers_do(tmp_path: Path) -> None:
    tmp_path.joinpath("a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n \r\n{"a": "x\xe2\x80\xa8y"}\r\n')
    assert read_records(tmp_path, "a") == [
        DataRecord("a.jsonl, line 1,", {"a": 1}),
        DataRecord("a.jsonl, line 4,", {"a": "x\u2028y"}),
    ]


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "There is no a.jsonl that can be read in '.*': put the data of a there"),
        (b"", "a.jsonl is empty: put one JSON object on each line."),
        (b"\n \n", "a.jsonl is empty"),
        ('{"a": "é"}'.encode("latin-1"), "a.jsonl is not encoded in UTF-8"),
        (b'{"a": 1}\n{"a": 2', "a.jsonl, line 2, is not a JSON object"),
        (b"[1, 2]", "a.jsonl, line 1, is not a JSON object"),
        (b"[" * 100_000, "a.jsonl, line 1, is not a JSON object"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        tmp_path.joinpath("a.jsonl").write_bytes(content)
    with pytest.raises(KeepsetError, match=sentence) as caught:
        read_records(tmp_path, "a")
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_folder_in_a_file_s_place_is_one_sentence(tmp_path: Path) -> None:
    tmp_path.joinpath("a.jsonl").mkdir()
    with pytest.raises(KeepsetError, match=r"There is no a\.jsonl that can be read"):
        read_records(tmp_path, "a")


def test_a_missing_field_is_named_with_its_line() -> None:
    row = DataRecord("a.jsonl, line 3,", {"x": None, "y": 0})
    assert row.first("y") == 0 and row.first("x", "y") == 0
    with pytest.raises(KeepsetError, match=r"^a.jsonl, line 3, lacks the field 'x' or 'z': it has 'x', 'y'\.$"):
        row.first("x", "z")
    with pytest.raises(KeepsetError, match="lacks the field 'z': it has no field"):
        DataRecord("b", {}).first("z")
