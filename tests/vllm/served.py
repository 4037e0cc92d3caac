"""vLLM servers of a small random model: saved, started and asked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from keepset.lab.embedded import embedded_folder
from keepset.lab.server_process import ServerProcess, free_port
from keepset.recipe import Recipe
from keepset.serving.command import command
from tests.vllm.processes import SPARING
from tests.vllm.serve import forked

OPTIONS = ["--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny"]
# So few blocks that requests wait and are preempted: each may need 12, and the pool has 47.
OPTIONS += ["--block-size", "32", "--num-gpu-blocks-override", "48", "--max-model-len", "384"]
OPTIONS += ["--max-num-seqs", "24", "--max-num-batched-tokens", "128"]


def save_model(folder: Path, **more: Any) -> Path:
    """Saves a random model of two layers, with the embedded model's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=49152,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in (*embedded_folder().glob("tokenizer*"), *embedded_folder().glob("chat_template*")):
        shutil.copy(file, folder)
    return folder


@contextmanager
def served(
    model: Path,
    recipe: str | None,
    options: Sequence[str] = (),
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    **contexts: Any,
) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    """A server that answers, and a client of it; `contexts` are as `command` takes them."""
    port = free_port()
    words = command(
        str(model), Recipe.parse(recipe) if recipe else None, [*OPTIONS, *options, "--port", str(port)], **contexts
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SPARING, **(env or {})}.items():
            patch.setenv(name, value)
        with ServerProcess(forked(words), port) as server, httpx.Client(base_url=server.url, timeout=timeout) as client:
            server.wait(600)
            yield server, client


CALLS = """
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The end of chat templates with calls of tools, of which the embedded model's own knows nothing."""


@contextmanager
def served_chats(
    folder: Path,
    template: str,
    options: Sequence[str] = (),
    recipe: str = "adakv(snapkv, bytes=0.25, turns=True)",
) -> Iterator[str]:
    """The address of a server of the embedded model that keeps conversations, with a chat template of its own."""
    file = folder / "chat.jinja"
    file.write_text(template, encoding="utf-8")
    size = ["--max-model-len", "2048", "--num-gpu-blocks-override", "256", "--chat-template", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        with served(embedded_folder(), recipe, [*size, *options]) as (server, _):
            yield server.url
