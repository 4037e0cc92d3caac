from __future__ import annotations

from typing import Any

import pytest

from keepset.errors import KeepsetError
from keepset.serving.load import Load, ServedModel, check_fits, local_url, served_model
from tests.serving.fake_vllm import Fake


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.255.3.4:1/", "http://127.255.3.4:1"),
        ("http://localhost", "http://localhost"),
        ("HTTP://LocalHost:80", "http://localhost:80"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_addresses_of_this_machine(url: str, address: str) -> None:
    assert local_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        *("http://10.0.0.1:8000", "http://0.0.0.0:8000", "http://128.0.0.1", "http://example.org"),
        *("http://localhost.example.org", "http://127.0.0.1.example.org", "http://2130706433", "http://0x7f.1"),
        *("http://[::2]", "http://[::ffff:8.8.8.8]", "http://[::ffff:127.0.0.1]", "http://[::1%25eth0]"),
    ],
)
def test_no_other_machine_is_put_under_load(url: str) -> None:
    with pytest.raises(KeepsetError, match="is not on this machine"):
        local_url(url)


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:8000", "https://127.0.0.1", "ftp://127.0.0.1", "http://", "http://127.0.0.1:port"),
        *("http://127.0.0.1:99999", "http://127.0.0.1@example.org", "http://a:b@127.0.0.1", "http://:b@127.0.0.1"),
        *("http://127.0.0.1/v1", "http://127.0.0.1/?a", "http://127.0.0.1/#a", "http://[::1", "//127.0.0.1"),
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(KeepsetError, match=r"--url .* is not the address of a server"):
        local_url(url)


@pytest.mark.parametrize(
    ("name", "value", "because"),
    [
        ("requests", 0, "--requests 0 is out of range: use an integer from 1 to 10000"),
        ("requests", 10001, "--requests 10001 is out of range"),
        ("concurrency", 0, "--concurrency 0 is out of range"),
        ("concurrency", 1001, "--concurrency 1001 is out of range: use an integer from 1 to 1000"),
        ("prompt_tokens", 0, "--prompt-tokens 0 is out of range"),
        ("output_tokens", -1, "--output-tokens -1 is out of range"),
        ("rounds", 0, "--rounds 0 is out of range"),
        ("seed", -1, "--seed -1 is out of range"),
    ],
)
def test_sizes(name: str, value: Any, because: str) -> None:
    sizes = dict(requests=10000, prompt_tokens=1, output_tokens=1, concurrency=1000)
    Load(**sizes)
    with pytest.raises(KeepsetError) as refused:
        Load(**{**sizes, name: value})
    assert because in str(refused.value)


def test_a_server_says_what_it_serves(fake: Fake) -> None:
    assert served_model(fake.url) == ServedModel("fake", "here", 4096)
    fake.models = {"data": [{"id": 5, "root": None, "max_model_len": "many"}]}
    assert served_model(fake.url) == ServedModel("5", None, None)


@pytest.mark.parametrize("said", [{}, {"data": []}, {"data": [[]]}, [], {"data": [{"name": "x"}]}])
def test_a_server_of_another_kind_is_refused(fake: Fake, said: Any) -> None:
    fake.models = said
    with pytest.raises(KeepsetError, match="There is no OpenAI-compatible server at"):
        served_model(fake.url)


def test_a_load_has_to_fit_the_context() -> None:
    load = Load(1, 30, 10, 1, question_tokens=5)
    check_fits(load, ServedModel("", None, 45))
    check_fits(load, ServedModel("", None, None))
    with pytest.raises(KeepsetError, match="35 tokens of prompt and 10 of output do not fit"):
        check_fits(load, ServedModel("", None, 44))
