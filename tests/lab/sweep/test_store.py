"""A sweep's file: what it gives back, who may write to it, and what is refused."""

import dataclasses
import errno
import json
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import make_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from keepset import registry
from keepset.allocators.heads import AdaKV
from keepset.core.method import parameter
from keepset.errors import KeepsetError
from keepset.lab.record import FULL, Record
from keepset.lab.sweep.store import Store, check_free
from keepset.methods.second_pass import PromptQueries
from keepset.recipe import in_full, in_short

CONFIGURATION = {"weights": "0a1b", "--limit": None, "--mode": "prompt", "--temperature": 0.0}
KEY = ("gsm8k", 0, "a")
NO_SWEEP = "is damaged, or no file of `keepset eval`: name another file"


def cell(recipe: str = "knorm(keep=0.5)", example: str = "a", **changes: Any) -> Record:
    made = Record(recipe, "knorm", "keep=0.5", "gsm8k", 0, example, {"depth": 0.1, "kind": "x"}, "accuracy")
    made = dataclasses.replace(made, **changes)
    if made.error is not None:
        return made
    figures = {"keep": 1 / 3, "kv_bytes": 10, "kv_bytes_full": 20}
    replies = ["42 \N{SNOWMAN}\0\ud800", [[-1.5, True]]]
    return dataclasses.replace(made, scores={"accuracy": 0.1 + 0.2}, figures=figures, replies=replies)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sweep.jsonl"


def begin(path: Path, **configuration: Any) -> Store:
    return Store.begin(path, "a model", {**CONFIGURATION, **configuration})


def put(path: Path, *cells: Record) -> None:
    with begin(path) as opened:
        opened.register("gsm8k", 0, sorted({each.example for each in cells}), "digest")
        for each in cells:
            assert opened.save(each)


def read(path: Path) -> list[Record]:
    with Store.open(path) as opened:
        return opened.cells()


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The one sentence with which a call is refused; nothing if it is not."""
    try:
        opened = call(*arguments, **options)
    except KeepsetError as error:
        assert "\n" not in str(error)
        return str(error)
    if isinstance(opened, Store):
        opened.close()
    return ""


def test_what_is_written_is_read_again(path: Path) -> None:
    made = [cell(), cell("random", requested=None), cell("tova", error="It cannot be had."), cell("x", "b")]
    put(path, *made)
    with Store.open(path) as opened:
        assert opened.cells() == made
        assert (opened.model, opened.configuration) == ("a model", CONFIGURATION)
        assert opened.examples("gsm8k", 0) == ["a", "b"] and opened.examples("gsm8k", 1) is None
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    with Store.begin(path, "another folder", CONFIGURATION) as opened:
        assert opened.model == "a model"


def test_cells_come_in_the_order_of_examples_and_recipes_however_they_were_written(path: Path) -> None:
    with begin(path) as opened:
        opened.register("gsm8k", 0, ["10", "9"], "digest")
        for name, example in [("z", "9"), ("a", "9"), ("a", "10"), ("z", "10")]:
            assert opened.save(cell(name, example))
        order = [("10", "z"), ("10", "a"), ("9", "z"), ("9", "a")]
        assert [(each.example, each.recipe) for each in opened.cells()] == order


def test_cells_keep_their_meaning_when_a_default_or_a_name_changes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "adakv(echo(stride=4), keep=0.5)"  # which is not what prompt_queries is called where it was written
    renamed = make_dataclass("Echo", [], bases=(PromptQueries,), namespace={"name": "echo"}, frozen=True)
    with monkeypatch.context() as then:
        then.setitem(registry._methods, "echo", renamed)
        refused = "adakv(snapkv, keep=0.5, every=8)"  # no such recipe can be made
        put(path, *(cell(text, method="adakv(snapkv)") for text in (FULL, "adakv(snapkv, keep=0.5)", refused, before)))
    monkeypatch.setitem(registry._SPELLINGS, "echo", ("prompt_queries", {}))
    in_full.cache_clear()
    in_short.cache_clear()
    changed = [("floor", float, parameter(0.75, minimum=0.0, maximum=1.0))]
    later = make_dataclass("Later", changed, bases=(AdaKV,), frozen=True)
    monkeypatch.setitem(registry._methods, "adakv", later)
    today = [f"adakv({text})" for text in ("snapkv, floor=0.2, keep=0.5", "snapkv, floor=0.2, keep=0.5, every=8")]
    today = [FULL, *today, "adakv(prompt_queries(stride=4), floor=0.2, keep=0.5)"]
    with begin(path) as store:
        assert [each.recipe for each in store.cells()] == today
        assert {each.method for each in store.cells()} == {"adakv(snapkv, floor=0.2)"}
        assert store.done() == {(*KEY, text) for text in today}
        assert not store.save(cell(today[1], method="adakv(snapkv, floor=0.2)"))
        assert store.save(cell("adakv(snapkv, keep=0.5)", method="adakv(snapkv)"))
    in_full.cache_clear()
    in_short.cache_clear()
    monkeypatch.undo()
    assert read(path)[-1].recipe == "adakv(snapkv, floor=0.75, keep=0.5)"


def test_a_cell_is_written_once_and_read_while_another_writes(path: Path) -> None:
    with begin(path) as store:
        assert not store.done() and store.save(cell())
        assert not store.save(cell(error="another"))
        store.register("gsm8k", 0, ["a"], "digest")
        assert read(path) == store.cells() == [cell()]
        assert store.save(cell("tova"))
        assert read(path) == store.cells() == [cell(), cell("tova")]


def test_a_second_process_is_refused_in_a_sentence_until_the_first_has_ended(path: Path) -> None:
    with get_context("fork").Pool(1) as another:
        with begin(path) as store:
            store.save(cell())
            said = another.apply(refusal, (begin, path))
            assert "Another process is adding to" in said and said == another.apply(refusal, (check_free, path))
            with Store.open(path) as reader:
                assert reader.done() == {(*KEY, "knorm(keep=0.5)")}
            assert store.save(cell("tova"))
        assert another.apply(refusal, (check_free, path)) == another.apply(refusal, (begin, path)) == ""


def test_a_process_that_was_killed_holds_no_file(path: Path) -> None:
    began = get_context("fork").Event()

    def hold() -> None:
        with begin(path):
            began.set()
            time.sleep(600)

    process = get_context("fork").Process(target=hold)
    process.start()
    assert began.wait(60) and "Another process" in refusal(begin, path)
    process.kill()
    process.join()
    put(path, cell())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--mode": "agnostic", "--temperature": 0.5}, "(--mode: prompt, not agnostic; --temperature: 0.0, not 0.5)"),
        ({"weights": "f" * 64, "--limit": 20}, f"(weights: 0a1b, not {'f' * 37}...; --limit: none, not 20)"),
    ],
)
def test_another_configuration_is_refused(path: Path, change: dict[str, Any], said: str) -> None:
    put(path, cell())
    before = path.read_bytes()
    sentence = refusal(begin, path, **change)
    assert said in sentence and "use those, or name another with --out" in sentence and path.read_bytes() == before
    with Store.open(path) as opened:
        opened.check({"--limit": None})
        assert said in refusal(opened.check, change)


def test_other_examples_and_files_of_other_versions_are_refused(path: Path) -> None:
    put(path, cell())
    with begin(path) as opened:
        opened.register("gsm8k", 0, ["a"], "digest")
        opened.register("gsm8k", 1, ["b"], "another")
        said = refusal(opened.register, "gsm8k", 0, ["a"], "another")
        assert "gsm8k's examples with seed 0 differ from those in" in said
    whole = path.read_bytes()
    for version in (1, 4, 7):
        path.write_bytes(whole.replace(b'"keepset sweep": 5', f'"keepset sweep": {version}'.encode()))
        said = f"is of another version of keepset (format {version}, this one's is 5)"
        assert said in refusal(begin, path) and said in refusal(Store.open, path)
        assert path.read_bytes() != whole


def test_what_a_crash_cut_short_is_missing_and_written_again(path: Path) -> None:
    """After every byte of the last cell, and of the examples before it; what the reader sees and what is left."""
    put(path, cell())
    before = path.read_bytes()
    with begin(path) as opened:
        opened.register("gsm8k", 1, ["a"], "another")
        assert opened.save(cell("tova"))
    whole = path.read_bytes()
    assert whole.startswith(before) and whole.count(b"\n") == 5
    for length in range(len(before), len(whole)):
        path.write_bytes(whole[:length])
        assert read(path) == [cell()] and path.read_bytes() == whole[:length]
        with begin(path) as opened:
            assert path.read_bytes() == whole[: whole[:length].rfind(b"\n") + 1]
            opened.register("gsm8k", 1, ["a"], "another")
            assert opened.save(cell("tova"))
        assert path.read_bytes() == whole
    path.write_bytes(b"")  # it was killed before the first line
    put(path, cell())
    assert path.read_bytes() == before


def sqlite(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE cells (cell)")
    database.close()


def damaged(old: bytes, new: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        put(path, *(cell(f"knorm(sinks={i}, keep=0.5)") for i in range(9)))
        whole = path.read_bytes()
        path.write_bytes(whole.replace(old, new, 1))
        assert path.read_bytes() != whole

    return damage


OUTCOME = json.dumps(cell().to_json()["outcome"]).encode()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b"Dear diary,\n" * 1000), NO_SWEEP),
        (lambda path: path.write_bytes(bytes(range(256)) * 64), NO_SWEEP),
        (lambda path: path.write_bytes(b"a word"), NO_SWEEP),
        (lambda path: path.write_bytes(b'{"keepset": 5}\n'), NO_SWEEP),
        (lambda path: path.write_bytes(b"[" * 100_000 + b"\n"), NO_SWEEP),
        (sqlite, "is an SQLite file, as older versions of keepset wrote: use such a version, or name another file."),
        *(
            (damaged(old, new), NO_SWEEP)
            for old, new in [
                (b"accuracy", b"\xff\xff"),
                (b"}\n{", b"}{"),
                (b'"seed"', b'"seeds"'),
                (b'"configuration": {', b'"configuration": [{'),
                (OUTCOME, b'{"score": 1}'),
                (b"\n", b"\n[]\n"),
            ]
        ),
    ],
)
def test_what_is_no_sweep_or_damaged_is_refused_and_left_alone(
    path: Path, make: Callable[[Path], Any], said: str
) -> None:
    make(path)
    before = path.read_bytes()
    assert said in refusal(begin, path) and said in refusal(Store.open, path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_cell_of_no_example_is_refused(path: Path) -> None:
    with begin(path) as opened:
        assert opened.save(cell())
        assert NO_SWEEP in refusal(opened.cells)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_line_that_cannot_be_written_is_taken_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """After a part of it: on a full disk, which is said, or when somebody stops the command."""
    put(path, cell())
    before, write = path.read_bytes(), os.write
    with begin(path) as opened:
        parts = iter([10, 1])

        def partly(descriptor: int, data: Any) -> int:
            if (part := next(parts, None)) is None:
                raise error
            return write(descriptor, data[:part])

        with monkeypatch.context() as full:
            full.setattr(os, "write", partly)
            if isinstance(error, OSError):
                said = refusal(opened.save, cell("long"))
                assert "cannot be written (No space left on device): make room there" in said
                assert said.endswith("cells that are there are kept.")
            else:
                with pytest.raises(KeyboardInterrupt):
                    opened.save(cell("long"))
        assert path.read_bytes() == before and opened.done() == {(*KEY, "knorm(keep=0.5)")}
        assert opened.save(cell("long"))
    assert read(path) == [cell(), cell("long")]


def test_no_place_for_a_file_is_said(path: Path) -> None:
    assert "cannot be written (Is a directory)" in refusal(begin, path.parent)
    assert "cannot be written (No such file or directory)" in refusal(begin, path.parent / "missing" / "sweep.jsonl")
    said = refusal(Store.open, path)
    assert refusal(Store.open, path.parent).startswith(f"{str(path.parent)!r} is a folder")
    assert said.startswith("There is no file") and "name a file that `keepset eval` has written" in said
    assert list(path.parent.iterdir()) == []
