"""Tasks by the names that users write."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from keepset import KeepsetError
from keepset.lab.tasks.find import check_names, find
from keepset.lab.tasks.task import TaskSettings
from tests.lab.tasks.scaffold import WITH_HARNESS

pytestmark = WITH_HARNESS


@pytest.fixture(autouse=True)
def few_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reading the harness's thousands of own tasks takes seconds."""
    from lm_eval.tasks import TaskManager

    from keepset.lab.tasks import find, harness

    tmp_path.joinpath("a.yaml").write_text("task: hellaswag\ndataset_path: x")
    tmp_path.joinpath("b.yaml").write_text("task: gsm8k\ndataset_path: x")
    monkeypatch.setattr(
        harness, "TaskManager", partial(TaskManager, include_path=str(tmp_path), include_defaults=False)
    )
    monkeypatch.setattr(find, "harness_folder", lambda: tmp_path)
    harness._manager.cache_clear()
    yield
    harness._manager.cache_clear()


def test_a_misspelt_name_is_told_before_the_harness_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from keepset.lab.tasks import harness

    monkeypatch.setattr(harness, "TaskManager", None)  # it would be called
    for name in ("hellaswg", ""):
        with pytest.raises(KeepsetError, match="There is no task"):
            check_names(["needle", name])
    check_names(["needle", "hellaswag", "a/file/of/mine.yaml"])


def test_tasks_come_in_the_order_of_their_names_and_each_once() -> None:
    settings = TaskSettings(lengths=(512, 1024))
    tasks = find(["needle", "aime24", "needle", "gsm8k", "aime24"], settings)
    assert [task.name for task in tasks] == ["needle@512", "needle@1024", "aime24", "gsm8k"]
    assert tasks[-1].metric == "accuracy"  # keepset's own, not the harness's
    every = [task.name for task in find(["ruler"], TaskSettings())]
    mixed = [task.name for task in find(["niah_single_2", "ruler"], TaskSettings())]
    assert mixed[0] == "niah_single_2@4096" != every[0] and sorted(mixed) == sorted(every)


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("gsm8", "There is no task 'gsm8'; did you mean 'gsm8k'?"),
        ("hellaswg", "There is no task 'hellaswg'; did you mean 'hellaswag'?"),
        ("niah_single1", "did you mean 'niah_single_1', 'niah_single_"),
        ("needle@4096", "There is no task 'needle@4096'; did you mean 'needle'"),
        ("no/such/file.yaml", "There is no task 'no/such/file.yaml'"),
        ("", "There is no task ''; name one such as gsm8k"),
    ],
)
def test_an_unknown_name_is_one_sentence_with_the_nearest(name: str, sentence: str) -> None:
    with pytest.raises(KeepsetError) as caught:
        find(["aime24", name], TaskSettings())
    assert sentence in str(caught.value)
    with pytest.raises(KeepsetError, match="There is no task to evaluate: name one, such as gsm8k"):
        find([], TaskSettings())


def test_without_the_harness_and_settings_out_of_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(KeepsetError) as caught:
        find(["hellaswag"], TaskSettings())
    assert "no task 'hellaswag' without lm-evaluation-harness: pip install \"keepset[eval]\"" in str(caught.value)
    assert find(["needle"], TaskSettings())[0].name == "needle@4096"
    with pytest.raises(KeepsetError, match=r"There is no folder '.*nowhere' to take data from"):
        TaskSettings(data=tmp_path / "nowhere")
    for lengths in ((), (4096, 0)):
        with pytest.raises(KeepsetError, match=r"lengths=.* are no lengths in tokens"):
            TaskSettings(lengths=lengths)
