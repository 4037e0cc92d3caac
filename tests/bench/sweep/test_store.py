"""A sweep's file: what it gives back, who may write to it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import time
from dataclasses import make_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from keepset import registry
from keepset.allocators.adakv import AdaKV
from keepset.bench.record import FULL, Record
from keepset.bench.sweep.store import Store, check_free
from keepset.core.method import parameter
from keepset.errors import KeepsetError
from keepset.methods.prompt_queries import PromptQueries
from keepset.recipe import in_full, in_short

CONFIGURATION = {"weights": "0a1b", "--limit": None, "--mode": "prompt", "--temperature": 0.0}
KEY = ("gsm8k", 0, "a")


def cell(recipe: str = "knorm(keep=0.5)", example: str = "a", **changes: Any) -> Record:
    made = Record(recipe, "knorm", 0.5, "gsm8k", 0, example, {"depth": 0.1, "kind": "x"}, "accuracy")
    made = dataclasses.replace(made, **changes)
    if made.error is not None:
        return made
    figures = {"keep": 1 / 3, "kv_bytes": 10, "kv_bytes_full": 20}
    replies = ["42 \N{SNOWMAN}\0\ud800", [[-1.5, True]]]
    return dataclasses.replace(made, scores={"accuracy": 0.1 + 0.2}, figures=figures, replies=replies)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "50%?.sqlite"  # a name that is no good as it is in an address


def begin(path: Path, **configuration: Any) -> Store:
    return Store.begin(path, "a model", {**CONFIGURATION, **configuration})


def put(path: Path, *cells: Record) -> None:
    with begin(path) as opened:
        opened.register("gsm8k", 0, sorted({each.example for each in cells}), "digest")
        for each in cells:
            assert opened.save(each)


def refusal(path: Path, **configuration: Any) -> str:
    """The one sentence with which a file is refused."""
    with pytest.raises(KeepsetError) as error:
        begin(path, **configuration)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_written_is_read_again(path: Path) -> None:
    cells = [
        cell(),
        dataclasses.replace(cell("random"), requested=None),
        cell("tova", error="It cannot be had."),
        cell("x", "b"),
    ]
    put(path, *cells)
    with Store.open(path) as opened:
        assert opened.cells() == cells
        assert (opened.model, opened.configuration) == ("a model", CONFIGURATION)
        assert opened.examples("gsm8k", 0) == ["a", "b"] and opened.examples("gsm8k", 1) is None
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_cells_come_in_the_order_of_examples_and_recipes_however_they_were_written(path: Path) -> None:
    with begin(path) as opened:
        opened.register("gsm8k", 0, ["10", "9"], "digest")
        for each in [cell("z", "9"), cell("a", "9"), cell("a", "10"), cell("z", "10")]:
            assert opened.save(each)
        assert [(each.example, each.recipe) for each in opened.cells()] == [
            ("10", "z"),
            ("10", "a"),
            ("9", "z"),
            ("9", "a"),
        ]


def test_cells_mean_what_they_meant_when_a_default_or_a_name_has_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = "adakv(echo(stride=4), keep=0.5)"  # which is not what prompt_queries is called where it was written
    renamed = make_dataclass("Echo", [], bases=(PromptQueries,), namespace={"name": "echo"}, frozen=True)
    with monkeypatch.context() as then:
        then.setitem(registry._methods, "echo", renamed)
        refused = "adakv(snapkv, keep=0.5, every=8)"  # no such recipe can be made
        put(path, *(cell(text, method="adakv(snapkv)") for text in (FULL, "adakv(snapkv, keep=0.5)", refused, before)))
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
        assert store.done() == {(KEY, text) for text in today}
        assert not store.save(cell(today[1], method="adakv(snapkv, floor=0.2)"))
        assert store.save(cell("adakv(snapkv, keep=0.5)", method="adakv(snapkv)"))
    in_full.cache_clear()
    in_short.cache_clear()
    monkeypatch.undo()
    with Store.open(path) as store:
        assert [each.recipe for each in store.cells()][-1] == "adakv(snapkv, floor=0.75, keep=0.5)"


def test_reads_while_another_writes(path: Path) -> None:
    put(path, cell())
    with begin(path) as writer, Store.open(path) as reader:
        assert [each.recipe for each in reader.cells()] == ["knorm(keep=0.5)"]
        assert writer.save(cell("tova"))
        assert [each.recipe for each in reader.cells()] == ["knorm(keep=0.5)", "tova"]
        with pytest.raises(KeepsetError, match="cannot be written"):
            reader.save(cell("random"))


def test_a_cell_is_written_once(path: Path) -> None:
    with begin(path) as store:
        assert store.is_empty
        assert store.save(cell()) and not store.is_empty
        assert not store.save(cell(error="another"))
        store.register("gsm8k", 0, ["a"], "digest")
        assert store.cells() == [cell()]


def test_a_second_process_is_refused_in_a_sentence_until_the_first_has_ended(path: Path) -> None:
    with get_context("fork").Pool(1) as another:
        with begin(path) as store:
            store.save(cell())
            assert another.apply(begun, (path,)) == another.apply(free, (path,))
            assert "Another process is adding to" in another.apply(begun, (path,))
            with Store.open(path) as reader:
                assert reader.done() == {(KEY, "knorm(keep=0.5)")}
            assert store.save(cell("tova"))
        assert another.apply(free, (path,)) == another.apply(begun, (path,)) == ""


def test_a_process_that_was_killed_holds_no_file(path: Path) -> None:
    began = get_context("fork").Event()

    def hold() -> None:
        with begin(path):
            began.set()
            time.sleep(600)

    process = get_context("fork").Process(target=hold)
    process.start()
    assert began.wait(60) and "Another process" in refusal(path)
    process.kill()
    process.join()
    put(path, cell())


def begun(path: Path) -> str:
    """What another process is told that begins the sweep."""
    try:
        begin(path).close()
    except KeepsetError as error:
        return str(error)
    return ""


def free(path: Path) -> str:
    try:
        check_free(path)
    except KeepsetError as error:
        return str(error)
    return ""


def test_files_of_the_version_before_are_gone_on_with(path: Path) -> None:
    put(path, cell())
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 3")
        database.execute("CREATE TABLE claims (task TEXT, token TEXT NOT NULL)")
        database.execute("INSERT INTO claims VALUES ('gsm8k', 'of a process that is gone')")
    database.close()
    put(path, cell("tova"))
    with Store.open(path) as store:
        assert store.cells() == [cell(), cell("tova")]


def test_reads_where_it_must_not_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(path, cell())
    before = path.read_bytes()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # who runs the tests may be allowed everything
    with Store.open(path) as opened:
        assert opened.cells() == [cell()]
        assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--limit": 20}, "(--limit: none, not 20)"),
        ({"--mode": "agnostic", "--temperature": 0.5}, "(--mode: prompt, not agnostic; --temperature: 0.0, not 0.5)"),
        ({"weights": "f" * 64}, f"(weights: 0a1b, not {'f' * 37}...)"),
    ],
)
def test_another_configuration_is_refused(path: Path, change: dict[str, Any], said: str) -> None:
    put(path, cell())
    before = path.read_bytes()
    sentence = refusal(path, **change)
    assert said in sentence and "go on as there, or name another with --out" in sentence
    assert path.read_bytes() == before
    with Store.open(path) as opened:
        opened.check({"--limit": None})
        with pytest.raises(KeepsetError, match="--limit: none, not 3"):
            opened.check({"--limit": 3})


def test_the_model_may_have_moved(path: Path) -> None:
    put(path, cell())
    with Store.begin(path, "another folder", CONFIGURATION) as opened:
        assert opened.model == "a model"


def test_other_examples_are_refused(path: Path) -> None:
    put(path, cell())
    with begin(path) as opened:
        opened.register("gsm8k", 0, ["a"], "digest")
        opened.register("gsm8k", 1, ["b"], "another")
        with pytest.raises(KeepsetError, match="gsm8k's examples with seed 0 are not those that"):
            opened.register("gsm8k", 0, ["a"], "another")


def test_an_empty_file_is_a_new_one(path: Path) -> None:
    path.touch()
    put(path, cell())
    with Store.open(path) as opened:
        assert opened.cells() == [cell()]


def test_a_file_that_was_left_at_once_is_a_new_one(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA journal_mode = WAL")
    database.close()
    assert path.stat().st_size > 0
    put(path, cell())


@pytest.mark.parametrize("kind", ["text", "database", "random"])
def test_a_file_that_is_no_sweep_is_refused_and_left_alone(path: Path, kind: str) -> None:
    if kind == "database":
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE cells (cell)")
        database.close()
    else:
        path.write_bytes(b"Dear diary,\n" * 1000 if kind == "text" else bytes(range(256)) * 64)
    before = path.read_bytes()
    assert "is damaged, or no file of `keepset eval`: name another with --out" in refusal(path)
    with pytest.raises(KeepsetError, match="is damaged, or no file of `keepset eval`"):
        Store.open(path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_damaged_file_is_refused(path: Path) -> None:
    put(path, *(cell(f"knorm(sinks={i}, keep=0.5)") for i in range(100)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2 // 4096 * 4096])
    assert "is damaged, or no file" in refusal(path)
    path.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    assert "is damaged, or no file" in refusal(path)
    path.write_bytes(whole)
    put(path, cell("one more"))


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({**cell().to_json(), "outcome": {"score": 1}})])
def test_a_cell_that_is_none_is_refused(path: Path, text: str) -> None:
    put(path, cell())
    with begin(path) as opened:
        opened._database.execute("UPDATE cells SET cell = ?", [text])
        with pytest.raises(KeepsetError, match="is damaged, or no file"):
            opened.cells()


@pytest.mark.parametrize("version", [1, 2, 7])
def test_another_format_is_refused(path: Path, version: int) -> None:
    put(path, cell())
    with begin(path) as opened:
        opened._database.execute(f"PRAGMA user_version = {version}")
    assert f"is of another version of keepset (format {version}, this one's is 4)" in refusal(path)


def test_a_full_disk_is_said_and_what_is_there_is_kept(path: Path) -> None:
    put(path, cell())
    with begin(path) as opened:
        (pages,) = opened._database.execute("PRAGMA page_count").fetchone()
        opened._database.execute(f"PRAGMA max_page_count = {pages}")
        long = cell("long", error="x" * 100_000)
        with pytest.raises(
            KeepsetError, match=r"cannot be written \(database or disk is full\): make room there"
        ) as error:
            opened.save(long)
        assert str(error.value).endswith("cells that are there are kept.")
        opened._database.execute(f"PRAGMA max_page_count = {pages + 1000}")
        assert opened.save(long)
    with Store.open(path) as opened:
        assert opened.cells() == [cell(), long]


def test_a_file_that_cannot_be_written_is_said(path: Path) -> None:
    put(path, cell())
    with begin(path) as opened:
        opened._database.execute("PRAGMA query_only = 1")
        with pytest.raises(KeepsetError, match=r"cannot be written .* make it writable, or name another"):
            opened.save(cell("tova"))
        opened._database.execute("PRAGMA query_only = 0")


def test_no_place_for_a_file_is_said(path: Path) -> None:
    assert "is no place for a file: give one in a folder that exists" in refusal(path.parent)
    assert "is no place for a file" in refusal(path.parent / "missing" / "sweep.sqlite")
    with pytest.raises(KeepsetError, match=r"There is no file .* name one that `keepset eval` has written"):
        Store.open(path)
    assert list(path.parent.iterdir()) == []
