"""The playground: what it sends is what the library makes, and only this machine's own page gets it."""

import base64
import http.client
import importlib.util
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import DynamicCache

import keepset
from keepset import models
from keepset.lab.cli.checks import offered_recipes
from keepset.lab.texts import chat_parts, essay
from keepset.lab.ui import playground
from keepset.lab.ui.playground import ANSWER, IMAGE_BYTES, ROLES, Playground
from keepset.lab.ui.server import HOST, PlaygroundServer
from tests.hf.pictures import folder, picture
from tests.lab.cli.conftest import Run, check_refused
from tests.lab.report.conftest import CHROMIUM

EVIL = "</script><img src=x onerror=window.pwned=1>"
TEXT = f"{essay()[:600]} 日本語 a\x97b {EVIL}"
WISH = {"text": TEXT, "question": "Who?", "recipe": "snapkv(window=8)", "budget": "0.25"}


FACTS: dict[str, Any] = {"model": "m", "text": "", "question": "", "recipes": [], "methods": []}


def running(held: Playground, facts: dict[str, Any]) -> Iterator[PlaygroundServer]:
    with PlaygroundServer(0, held, facts) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def server(tiny_pair: tuple[Any, Any]) -> Iterator[PlaygroundServer]:
    facts = {"model": EVIL, **WISH, "recipes": [WISH["recipe"]], "methods": ["knorm", "random"]}
    yield from running(Playground(*tiny_pair, None), facts)


def post(server: PlaygroundServer, body: Any, path: str = "/run", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", path, text, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def events(server: PlaygroundServer, **other: str) -> list[dict[str, Any]]:
    status, text = post(server, {**WISH, **other})
    assert status == 200 and text.endswith("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in text.split("\n\n")[:-1]]


def turn(server: PlaygroundServer, *history: str) -> list[dict[str, Any]]:
    status, text = post(server, {"history": history}, "/chat")
    assert status == 200
    return [json.loads(block.removeprefix("data: ")) for block in text.split("\n\n")[:-1]]


def answer(sent: list[dict[str, Any]], side: str) -> str:
    return "".join(event[side].get("text", "") for event in sent if side in event)


def test_both_answers_are_those_that_generate_gives(server: PlaygroundServer, tiny_pair: tuple[Any, Any]) -> None:
    model, tokenizer = tiny_pair
    sent = events(server)
    assert sent[-1] == {"done": True}
    assert ["below 256" in event["note"] for event in sent if "note" in event] == [True]
    context, rest = chat_parts(tokenizer, WISH["text"], WISH["question"])
    encoded = (tokenizer(part, add_special_tokens=False, return_tensors="pt") for part in (context, rest))
    ids, question = (tokens.input_ids for tokens in encoded)
    cache = keepset.Cache(model, "snapkv(window=8, bytes=0.25)")
    with torch.no_grad():
        model(ids, past_key_values=cache)
    length = {"max_new_tokens": ANSWER, "do_sample": False}
    ours = model.generate(**cache.ask(question), **length)[0, question.shape[1] :]
    full = model.generate(torch.cat([ids, question], 1), past_key_values=DynamicCache(config=model.config), **length)
    theirs = full[0, ids.shape[1] + question.shape[1] :]
    for side, expected in (("compressed", ours), ("full", theirs)):
        text = tokenizer.decode(expected, skip_special_tokens=True)
        # The tiny model may end within a character, which is not shown.
        assert text.rstrip("\N{REPLACEMENT CHARACTER}").startswith(answer(sent, side)) and answer(sent, side)
    (sizes,) = [event["compressed"] for event in sent if "kept" in event.get("compressed", {})]
    assert (sizes["allocated"], sizes["share"]) == (cache.nbytes, cache.share)
    (whole,) = [event["full"] for event in sent if "bytes" in event.get("full", {})]
    # Both are counted alike: two layers of two heads, 32 bytes an entry in 16 bits.
    assert whole["bytes"] == 4 * 32 * ids.shape[1] == whole["allocated"] / 2
    assert sizes["bytes"] / whole["bytes"] == sizes["share"]
    kept = cache.keep_set.mask(ids.shape[1])[:, 0].float()
    layers = [event for event in sent if "shares" in event]
    assert [event["layer"] for event in layers] == [1, 2]
    assert sizes["kept"] == pytest.approx(float(kept.mean()), abs=1e-6)
    assert layers[-1]["shares"] == pytest.approx(kept.mean((0, 1)).tolist(), abs=1e-3)
    assert "".join(text or "" for text in sent[0]["tokens"]) == context
    commands = sent[0]["command"].splitlines()
    assert commands[0].startswith("keepset context build") and commands[1].endswith("text.safetensors 'Who?'")
    compile(sent[0]["python"], "python", "exec")


def test_a_chat_is_that_of_the_library(
    server: PlaygroundServer, tiny_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers and figures are those of a conversation that is held beside it, also if a turn is asked for again."""
    monkeypatch.setattr(playground, "CHAT_ANSWER", 8)
    chat = keepset.Conversation(*tiny_pair, "quantized(pool(snapkv), bytes=0.25, short=256, turns=True)")
    said: list[str] = []
    for text, is_again in (("Who are you? " * 9, False), ("Who are you? " * 9, True), (EVIL, False), (EVIL, True)):
        del said[len(said) - 2 * is_again :]
        history = [{"role": ROLES[i % 2], "content": content} for i, content in enumerate([*said, text])]
        expected = chat.say(history, max_new_tokens=8, do_sample=False)
        *pieces, last = turn(server, *said, text)
        assert last["answer"] == expected == "".join(piece["text"] for piece in pieces)
        assert last["status"].startswith(f"{chat.computed} tokens of the history computed, {chat.reused} not again")
        assert (chat.computed == 1) == is_again and (chat.reused > 0) == bool(said or is_again)
        said += [text, expected]
    monkeypatch.setattr(playground, "CHAT_ANSWER", 1990)
    assert "undo turns until it has at most 58" in turn(server, *said, "And?")[-1]["error"]


def test_turns_that_are_none_are_refused(server: PlaygroundServer) -> None:
    for history in (None, "a", [], ["a", "b"], ["a", 1, "b"]):
        status, sentence = post(server, {"history": history}, "/chat")
        assert status == 400 and sentence.startswith("A turn is a JSON object")
    assert post(server, {"history": [" "]}, "/chat") == (400, "The message is empty: write some text.")
    status, sentence = post(server, {"history": ["a\ud800b"]}, "/chat")
    assert status == 400 and sentence.startswith("The message has half a character")


def test_what_always_stays_is_said(server: PlaygroundServer) -> None:
    """A window that is larger than the budget, in the words of `keepset compare`."""
    for recipe, budget, because in (
        ("snapkv(window=100)", "0.25", "More than the budget stays: snapkv"),
        ("streaming_llm(sinks=4, recent=40)", "44", "Nothing is chosen: streaming_llm"),
        ("knorm(short=1000)", "0.25", "fewer than short=1000"),
    ):
        (told,) = [event["note"] for event in events(server, recipe=recipe, budget=budget) if "note" in event]
        assert because in told


@pytest.fixture
def seeing() -> Iterator[PlaygroundServer]:
    """A playground of a model that looks at images."""
    model, tokenizer = models.load(str(folder()), "cpu")
    made = Playground(model, tokenizer, str(folder()), models.load_processor(model))
    yield from running(made, {**FACTS, "recipes": [WISH["recipe"]], "image": IMAGE_BYTES})


RECIPE = "streaming_llm(keep=24, sinks=0, protect='image')"
SEEN = {"text": "a blue house on a hill", "question": "how", "recipe": RECIPE}


def test_an_image_is_read_before_the_text(seeing: PlaygroundServer, tmp_path: Path) -> None:
    file = picture(tmp_path / "image.png")
    sent = events(seeing, **SEEN, image=base64.b64encode(file.read_bytes()).decode())
    assert sent[-1] == {"done": True} and sent[0]["grids"] == [[2, 4, 4]]
    (tmp_path / "text.txt").write_text(SEEN["text"], encoding="utf-8")
    shares = [event for event in sent if "shares" in event][-1]["shares"]
    assert shares == [0.0] * 2 + [1.0] * 16 + [0.0] * (len(shares) - 26) + [1.0] * 8
    assert "--image image.png" in sent[0]["command"]
    # The lines to copy give the same answer.
    lines, printed = sent[0]["python"].splitlines(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec("\n".join(lines), {"print": printed.append})
    assert printed[0].startswith("\n\nhow.A:" + answer(sent, "compressed")[:5]) and answer(sent, "compressed")
    without = events(seeing, **SEEN)
    assert without[0]["grids"] == [] and len(without[0]["tokens"]) == len(sent[0]["tokens"]) - 16


def test_images_that_are_none_are_refused(seeing: PlaygroundServer, server: PlaygroundServer, tmp_path: Path) -> None:
    good = picture(tmp_path / "image.png").read_bytes()

    def said(content: bytes, at: PlaygroundServer = seeing) -> str:
        *_, last = events(at, **SEEN, image=base64.b64encode(content).decode())
        return str(last["error"])

    assert said(b"<svg onload=alert(1)>").startswith("The image is no image that can be read: give an image as a PNG")
    assert said(good[: len(good) // 2]).startswith("The image is a damaged image")
    assert said(good, server) == "This model does not look at images: leave the image out."
    for image in ("@", 7):
        status, sentence = post(seeing, {**WISH, **SEEN, "image": image})
        assert status == 400 and sentence.startswith("The image is not a file in base64")
    much = base64.b64encode(bytes(IMAGE_BYTES + 1)).decode()
    assert post(seeing, {**WISH, **SEEN, "image": much}) == (400, "The image has more than 4 MB: give a smaller one.")


@pytest.mark.parametrize(
    ("other", "because"),
    [
        ({"text": " "}, "There is no text"),
        ({"text": "word " * 3000}, "give at most 2000"),
        ({"recipe": "snapkvv"}, "There is no method 'snapkvv'"),
        ({"budget": "much"}, "The budget 'much' is no number"),
        ({"budget": ""}, "does not say how much to keep"),
        ({"budget": "0"}, "keep=0 is out of range"),
    ],
)
def test_what_cannot_be_is_one_sentence(server: PlaygroundServer, other: dict[str, str], because: str) -> None:
    *before, last = events(server, **other)
    assert not before and because in last["error"] and "\n" not in last["error"]


def test_only_its_own_page_is_served(server: PlaygroundServer) -> None:
    here = f"{HOST}:{server.port}"
    for headers in ({"Host": "evil.example"}, {"Host": here, "Origin": "http://evil.example"}, {"Origin": "null"}):
        assert post(server, WISH, **headers)[0] == 403
    assert post(server, WISH, **{"Content-Type": "text/plain"})[0] == 415
    assert post(server, WISH, "/other")[0] == 404
    assert post(server, "{")[0] == post(server, {"text": 3})[0] == 400
    assert post(server, "x" * (1_000_001 + 4 * IMAGE_BYTES // 3))[0] == 413
    for name in WISH:
        status, sentence = post(server, {**WISH, name: "a\ud800b"})
        assert status == 400 and sentence.startswith(f"The {name} has half a character") and "place 2" in sentence
    assert post(server, {**WISH, "text": ""}, Host=f"localhost:{server.port}", Origin=f"http://{here}")[0] == 200


def test_one_run_at_a_time_of_a_page_that_holds_text_only_in_its_data_block(server: PlaygroundServer) -> None:
    with server.busy:
        status, text = post(server, WISH)
    assert status == 409 and "Another run is in progress" in text
    for _ in range(2):
        assert "There is no text" in events(server, text="")[-1]["error"]
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    connection.request("GET", "/")
    answer = connection.getresponse()
    page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    block = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(block)["model"] == EVIL and "pwned" not in page.replace(block, "")
    assert "default-src 'none'" in policy and "unsafe" not in policy.partition("script-src")[2].partition(";")[0]


def test_a_run_ends_before_its_server_has_closed() -> None:
    """Ctrl-C while a model computes: Python's end would abort the process."""
    began, ended = threading.Event(), threading.Event()

    class Endless:
        limit = 1

        def run(self, request: Any, send: Any) -> None:
            began.set()
            try:
                while True:
                    send({})
            finally:
                ended.set()

    server = PlaygroundServer(0, cast(Playground, Endless()), FACTS)
    threads = [
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}),
        threading.Thread(target=post, args=(server, WISH)),
    ]
    for thread in threads:
        thread.start()
    assert began.wait(60)
    server.shutdown()
    server.server_close()
    assert ended.is_set()
    for thread in threads:
        thread.join()


def test_it_offers_the_recipes_of_compare_on_a_free_port(run: Run, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        check_refused(run, "ui", "--port", port, because=f"Port {port} of 127.0.0.1 is not available")
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(PlaygroundServer, "__init__", lambda self, port, playground, facts: given.append(facts))
    monkeypatch.setattr(PlaygroundServer, "__exit__", lambda *_: None)
    monkeypatch.setattr(PlaygroundServer, "port", 0, raising=False)
    monkeypatch.setattr(PlaygroundServer, "serve_forever", lambda self: None)
    assert run("ui").code == 0
    assert given[0]["recipes"] == [str(recipe) for recipe in offered_recipes(tiny[0])]


@contextmanager
def opened(server: PlaygroundServer, **viewport: int) -> Iterator[Any]:
    """Its page in Chromium; nothing may have complained."""
    if CHROMIUM is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("needs the playwright package and an installed Chromium")
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport=viewport)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"http://{HOST}:{server.port}")
        yield page
        browser.close()
    assert complaints == []


@pytest.mark.full
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_in_chromium(server: PlaygroundServer, width: int, height: int) -> None:
    with opened(server, width=width, height=height) as page:
        assert page.locator("h1").text_content() == EVIL
        assert page.locator("#image-file").is_hidden() and page.locator("#with-image").is_hidden()
        page.locator("#run").click()
        page.locator("#status", has_text="Done.").wait_for()
        text = page.locator("#text").text_content()
        assert EVIL in text and "日本語" in text and "a\N{EM DASH}b" in text  # no font has \x97
        shares = page.locator("#text span").evaluate_all("all => all.map(s => s.style.getPropertyValue('--share'))")
        assert 0.2 < sum(map(float, shares)) / len(shares) < 0.4
        # Of 202 tokens 44, with 36 bytes an entry in place of 32.
        cost = page.locator("#compressed-cost").text_content()
        assert "24.5% of a full 16-bit cache\N{RIGHT SINGLE QUOTATION MARK}s bytes · 21.8% of the entries" in cost
        replies = [page.locator(f"#{side}-reply").text_content().strip() for side in ("full", "compressed")]
        verdict = page.locator("#verdict").text_content()
        assert all(replies) and verdict.startswith("The same" if replies[0] == replies[1] else "Another")
        # It stands above both answers, which stand above the text.
        places = [page.locator(f"#{name}").bounding_box()["y"] for name in ("verdict", "full-reply", "text")]
        assert places == sorted(places)
        # The list is of recipes; one that names a budget leaves no other to give.
        assert page.locator("#recipes option").all_text_contents()[:3] == [WISH["recipe"], "knorm", "random"]
        assert page.locator("#budget").is_enabled() and page.locator("#recipe").is_hidden()
        page.select_option("#recipes", label="Write your own …")
        page.locator("#recipe").fill("snapkv(keep=0.5)")
        assert page.locator("#budget").is_disabled()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.locator("#recipe").fill("nonsense")
        assert page.locator("#budget").is_enabled()
        page.locator("#run").click()
        page.locator("#status.failed", has_text="There is no method 'nonsense'").wait_for()
        assert page.evaluate("window.pwned") is None


@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 390])
def test_a_chat_in_chromium(server: PlaygroundServer, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground, "CHAT_ANSWER", 8)
    with opened(server, width=width, height=800) as page:
        page.get_by_role("button", name="Chat").click()
        assert page.locator("#read").is_hidden()
        page.locator("#undo").click()
        page.locator("#chat-status.failed", has_text="Nothing was said yet").wait_for()
        messages, costs = page.locator("#messages .said"), page.locator("#messages .note")
        for number, text in enumerate([EVIL, "And you?", "Then?"], start=1):
            page.locator("#message").fill(text)
            page.locator("#say").click()
            costs.nth(number - 1).filter(has_text="tokens of the history computed").wait_for()
            assert messages.nth(number - 1).text_content() == text
        reply = page.locator("#messages .reply:not(.said)").nth(2).text_content()
        page.locator("#again").click()
        costs.nth(2).filter(has_text="1 tokens of the history computed").wait_for()
        assert page.locator("#messages .reply:not(.said)").nth(2).text_content() == reply
        page.locator("#undo").click()
        assert messages.all_text_contents() == [EVIL, "And you?"]
        page.locator("#message").fill("word " * 3000)
        page.locator("#say").click()
        page.locator("#chat-status.failed", has_text="undo turns until it has at most").wait_for()
        assert page.locator("#message").input_value() == "word " * 3000 and messages.count() == 2
        assert page.evaluate("window.pwned") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_role("button", name="Read a text").click()
        assert page.locator("#chat").is_hidden() and page.locator("#run").is_enabled()


@pytest.mark.full
def test_a_browser_sends_an_image_and_draws_its_patches(seeing: PlaygroundServer, tmp_path: Path) -> None:
    (tmp_path / "evil.svg").write_text(EVIL, encoding="utf-8")
    (tmp_path / "large.png").write_bytes(bytes(IMAGE_BYTES + 1))
    with opened(seeing, width=1280, height=720) as page:
        page.locator("#input").fill(SEEN["text"])
        page.locator("#image").set_input_files(picture(tmp_path / "image.png"))
        page.locator("#run").click()
        page.locator("#status", has_text="Done.").wait_for()
        assert page.locator("#text .image .patch").count() == 16
        for file, said in (("evil.svg", "The image is no image that can be read"), ("large.png", "more than 4 MB")):
            page.locator("#image").set_input_files(tmp_path / file)
            page.locator("#run").click()
            page.locator("#status.failed", has_text=said).wait_for()
        page.locator("#image").set_input_files([])
        page.locator("#run").click()
        page.locator("#status", has_text="Done.").wait_for()
        assert page.locator("#text .patch").count() == 0
