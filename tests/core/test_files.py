"""Paths that a file may replace, and safetensors files that are read as safetensors itself reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from keepset import KeepsetError
from keepset.bench.report import page
from keepset.core.files import check_replaceable, quoted
from keepset.core.tensor_file import TensorFile
from keepset.core.tensor_reader import opened

FILE = TensorFile("x", 1, foreign="foreign.", other="other {found}.", damaged="damaged {path}.")


@pytest.mark.parametrize("what", ["pipe", "folder", "device", "link to a pipe", "loop"])
def test_nothing_but_a_file_is_replaced(what: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if what == "pipe":
        os.mkfifo(place)
    elif what == "folder":
        place.mkdir()
    elif what == "device":
        place.symlink_to("/dev/null")
    elif what == "loop":
        place.symlink_to(place)
    else:
        os.mkfifo(tmp_path / "pipe")
        place.symlink_to(tmp_path / "pipe")
    before = os.lstat(place)
    for write in (lambda: page.write(place, "page"), lambda: FILE.write(place, {"a": torch.ones(2)}, {"format": 1})):
        with pytest.raises(KeepsetError, match="cannot be written"):
            write()
    assert os.lstat(place).st_ino == before.st_ino and len(list(tmp_path.iterdir())) <= 2


def test_a_file_and_a_link_to_one_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    page.write(tmp_path / "file", "after")
    assert (tmp_path / "file").read_text() == "after"
    check_replaceable(tmp_path / "new")


@pytest.mark.parametrize("name", ["n" * 5000, "a\0b", "n" * 300])
def test_a_name_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(KeepsetError, match="cannot be written") as caught:
        page.write(tmp_path / name, "page")
    assert len(str(caught.value)) < 400 and len(quoted(name)) < 250
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_what_safetensors_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds = [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.uint8,
    ]
    tensors = {str(kind): (torch.randn(3, 5) * 50).to(kind) for kind in kinds}
    tensors |= {
        "truth": torch.rand(7) > 0.5,
        "none": torch.ones(0, 4),
        "single": torch.tensor(3),
        "row": torch.ones(1, 1, 9),
    }
    safetensors.torch.save_file(tensors, tmp_path / "file", {"said": "something"})
    theirs = safetensors.torch.load_file(tmp_path / "file")
    with opened(tmp_path / "file") as file:
        assert file.metadata == {"said": "something"} and file.layout.keys() == tensors.keys()
        for name, tensor in theirs.items():
            assert file[name].dtype == tensor.dtype and file[name].shape == tensor.shape
            assert torch.equal(file[name], tensor) and torch.equal(file[name], tensors[name])


def test_what_was_read_stays_as_it_was(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(100_000), "b": torch.ones(100_000)}, tmp_path / "file")
    with opened(tmp_path / "file") as file:
        first = file["a"]
        os.truncate(tmp_path / "file", 1000)  # a mapped file would end the process here
        assert first.sum() == 100_000
        with pytest.raises(ValueError, match="ends early"):
            file["b"]
