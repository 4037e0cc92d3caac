"""What is said of a recipe in the log: once, and only if it holds."""

from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import keepset
from keepset.hf import recipe_notes
from keepset.recipe import Recipe
from tests.hf.models import prompt, tiny


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_notes, "_warned", {})


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("snapkv(keep=0.1)", "snapkv(keep=0.1) always keeps the newest 64 of 200 tokens (32%)."),
        ("snapkv(bytes=0.1)", "snapkv(bytes=0.1) always keeps the newest 64 of 200 tokens (32%)."),
        (
            "streaming_llm(keep=0.02, recent=4)",
            "streaming_llm(keep=0.02, recent=4) always keeps the first 4 and the newest 4 of 200 tokens (4%).",
        ),
        ("snapkv(keep=0.5)", None),
        ("snapkv(keep=0.1, short=256)", None),
        ("knorm(keep=0.1)", None),
    ],
)
def test_more_than_the_budget_stays_and_is_said_once(
    recipe: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny("llama"), prompt(1, 200)
    for length in (200, 190):
        cache = keepset.Cache(model, recipe)
        with torch.no_grad():
            model(ids[:, :length], past_key_values=cache)
    assert caplog.messages == ([f"keepset: More than the budget stays: {said}"] if said else [])


def with_bos(tokenizer: Any) -> PreTrainedTokenizerFast:
    """A tokenizer that begins each text with a token."""
    begun = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<|im_start|>")
    begun.backend_tokenizer.post_processor = TemplateProcessing(
        single=["<|im_start|>", "$A"], special_tokens=[("<|im_start|>", begun.bos_token_id)]
    )
    return begun


def test_a_text_without_its_first_token_is_said_once_to_a_recipe_that_keeps_the_first_ones(
    embedded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless texts of the model begin with none."""
    plain, begun = embedded[1], with_bos(embedded[1])
    first, ids = begun.bos_token_id, plain("Some words")["input_ids"]
    recipe = Recipe.parse("streaming_llm(keep=0.2)")
    recipe_notes.warn_without_bos(recipe, plain, ids)
    recipe_notes.warn_without_bos(recipe, begun, [first, *ids])
    recipe_notes.warn_without_bos(Recipe.parse("snapkv(keep=0.2)"), begun, ids)
    assert caplog.messages == []
    for _ in range(2):
        recipe_notes.warn_without_bos(recipe, begun, ids)
    (message,) = caplog.messages
    assert message.startswith(
        "keepset: The text does not begin with <|im_start|>, as this model's texts do: without it"
    )
    assert "the first 4 tokens, which streaming_llm(keep=0.2) always keeps" in message


def test_a_conversation_whose_template_forgets_the_first_token_is_told(
    embedded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = embedded
    begun = with_bos(tokenizer)
    begun.chat_template = "{% for message in messages %}{{ message['content'] }}. {% endfor %}"
    chat = keepset.Conversation(model, begun, "streaming_llm(keep=0.2, turns=True)")
    chat.say([{"role": "user", "content": "Hello"}], max_new_tokens=1)
    assert [message[:40] for message in caplog.messages] == ["keepset: The text does not begin with <|"]
