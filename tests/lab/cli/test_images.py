"""Images on the command line: the model gets what its processor makes of them, and bad files are refused."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import DynamicCache

import keepset
from keepset import models
from keepset.lab import images
from tests.hf.pictures import folder, picture
from tests.lab.cli.conftest import Run, check_refused

TEXT = "the picture of a blue house. " * 6


@pytest.fixture
def pair() -> Any:
    """Paths of two pictures and a text in the folder where commands run."""
    Path("text").write_text(TEXT, encoding="utf-8")
    return picture(Path("a.png")), picture(Path("b.webp"), 1)


def made(question: str = "what", *files: str) -> dict[str, torch.Tensor]:
    """What the processor makes of a text, a question and images, in the words of its chat template."""
    model, _ = models.load(str(folder()), "cpu")
    prompt = f"U:{'<image>' * len(files)}{TEXT}\n\n{question}.A:"
    opened = [Image.open(file).convert("RGB") for file in files]
    return dict(models.load_processor(model)(text=prompt, images=opened, return_tensors="pt"))


def words(*more: str) -> list[str]:
    model = ("--model", str(folder()), "--device", "cpu")
    return [*model, "--text", "text", "--image", "a.png", "--image", "b.webp", *more]


def test_generate_answers_about_images(run: Run, pair: Any) -> None:
    model, tokenizer = models.load(str(folder()), "cpu")
    given = made("what", "a.png", "b.webp")
    length = given["input_ids"].shape[1]
    said = {}
    for recipe in ("knorm(keep=1.0)", "streaming_llm(keep=50, sinks=0, protect='image')"):
        done = run("generate", "what", "--recipe", recipe, "--output-tokens", "6", *words())
        assert done.code == 0, done.err
        past = DynamicCache() if "1.0" in recipe else keepset.Cache(model, recipe)
        ids = model.generate(**given, past_key_values=past, do_sample=False, max_new_tokens=6)[0, length:]
        said[recipe] = done.out
        assert done.out.rstrip("\n") == tokenizer.decode(ids, skip_special_tokens=True).rstrip("\n")
    assert f"kept {50 / length:.1%} of {length} prompt tokens" in done.err
    assert len(set(said.values())) == 2
    other = run("generate", "what", "--recipe", "knorm(keep=1.0)", "--output-tokens", "6", *words()[:-2])
    assert other.out != said["knorm(keep=1.0)"]


def test_a_context_with_images_is_asked(run: Run, pair: Any) -> None:
    recipe = "streaming_llm(keep=60, sinks=0, protect='image')"
    built = run("context", "build", "--recipe", recipe, "--out", "context", *words())
    assert built.code == 0, built.err
    asked = run("context", "ask", "context", "what", "--device", "cpu", "--output-tokens", "6")
    model, tokenizer = models.load(str(folder()), "cpu")
    given, rest = made("what", "a.png", "b.webp"), len("\n\nwhat.A:")
    past = keepset.Cache(model, recipe)
    begins = {**given, "input_ids": given["input_ids"][:, :-rest], "attention_mask": given["attention_mask"][:, :-rest]}
    with torch.no_grad():
        model(**begins, past_key_values=past)
        output = model.generate(**past.ask(given["input_ids"][:, -rest:]), do_sample=False, max_new_tokens=6)
    said = tokenizer.decode(output[0, rest:], skip_special_tokens=True)
    assert asked.code == 0 and asked.out.rstrip("\n") == said.rstrip("\n")


def test_compare_shades_the_patches_of_images(run: Run, pair: Any) -> None:
    """Figures are those of caches that are given the same inputs; the page has a grid for each image."""
    recipe = "streaming_llm(keep=60, sinks=0, protect='image')"
    asked = ["--question", "where", "--answer", "hill", "--json", "figures", "--html", "page"]
    done = run("compare", "--recipes", f"{recipe}, knorm(keep=0.3)", *asked, *words())
    assert done.code == 0, done.err
    figures = json.loads(Path("figures").read_text())
    given, rest = made("where", "a.png", "b.webp"), len("\n\nwhere.A:")
    length = given["input_ids"].shape[1] - rest
    assert figures["tokens"] == length and "drift_tokens" not in figures
    row = next(row for row in figures["rows"] if row["recipe"] == recipe)
    assert row["keep"] == pytest.approx(60 / length)
    data = json.loads(re.search(r'id="data">(.*?)</script>', Path("page").read_text())[1])
    section = next(section for section in data["sections"] if section["kind"] == "kept")
    assert section["grids"] == [[2, 4, 4], [18, 4, 4]] and len(section["tokens"]) == length
    model, _ = models.load(str(folder()), "cpu")
    past = keepset.Cache(model, "knorm(keep=0.3)")
    begins = {name: value[:, :-rest] if value.ndim == 2 else value for name, value in given.items()}
    with torch.no_grad():
        model(**begins, past_key_values=past)
    other = next(row for row in figures["rows"] if row["recipe"] == "knorm(keep=0.3)")
    assert other["keep"] == pytest.approx(past.events[0].kept / past.events[0].entries)
    mask = past.keep_set.mask(length)[:, 0].reshape(-1)
    packed = next(packed for name, packed in section["choices"] if name == "knorm(keep=0.3)")
    bits = np.unpackbits(np.frombuffer(gzip.decompress(base64.b64decode(packed)), np.uint8))[: len(mask)]
    assert torch.equal(torch.tensor(bits).bool(), mask)


def refused(said: str, *args: str, run: Run) -> None:
    check_refused(run, "generate", "what", "--recipe", "knorm(keep=9)", *args, because=said)


def test_bad_images_are_refused(run: Run, pair: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    content = Path("a.png").read_bytes()
    files = {
        "text": "'text' is no image that can be read: give an image as a PNG",
        "missing": "'missing' cannot be read (No such file or directory): give",
        ".": "'.' cannot be read (Is a directory): give",
        "half.png": "'half.png' is a damaged image: give",
        "bytes.png": "'bytes.png' is a damaged image: give",
        "postscript": "'postscript' is no image that can be read",
    }
    Path("half.png").write_bytes(content[: len(content) // 2])
    Path("bytes.png").write_bytes(content[:100] + bytes(50) + content[150:])
    Path("postscript").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    for file, said in files.items():
        refused(said, "--image", file, run=run)
    because = "--decode follows a text token by token: leave --image out."
    check_refused(run, "compare", "--decode", "--image", "a.png", because=because)
    monkeypatch.setattr(images, "_MAX_PIXELS", 40 * 40 - 1)
    refused("'a.png' has 40 x 40 pixels: give an image of at most", "--image", "a.png", run=run)
    monkeypatch.setattr(images, "_MAX_PIXELS", 40 * 40)
    refused("is a LlamaForCausalLM, which does not look at images: leave them out", "--image", "a.png", run=run)
    monkeypatch.setattr(images, "MAX_BYTES", len(content) - 1)
    refused("'a.png' has more than 0 MB: give a smaller image", "--image", "a.png", run=run)


def test_models_that_are_no_use_for_images(run: Run, pair: Any, tmp_path: Path) -> None:
    (tmp_path / "holds").write_text("an <image> here", encoding="utf-8")
    said = "The text has '<image>', which stands for an image: leave it out"
    refused(said, *words("--text", "holds"), run=run)
    refused("do not fit the model's context of 512", *words(*["--image", "a.png"] * 20), run=run)
