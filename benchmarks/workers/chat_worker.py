"""One vLLM engine of the embedded model, and clients that send their whole conversation with every turn."""

import argparse
import os
import random
import time
from typing import Any

from protocol import exchange, take_output

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

LAYERS, BLOCK = 30, 32
ANSWER, SAID, RESULT = 24, 120, 160
"""Tokens of an answer, of what a user says, and of a tool's result in it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("tokens", type=int)
    parser.add_argument("--threads")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = args.threads
    answers, engine = take_output(), _engine(args.recipe, args.tokens)
    names = ("chats", "turns", "kind", "seed")
    exchange(answers, {}, lambda asked: _chats(engine, args.recipe, **{name: asked[name] for name in names}))


def _engine(recipe: str, tokens: int) -> Any:
    """Return an engine whose pool holds so many tokens of all layers."""
    from vllm import LLM

    from keepset.lab.embedded import embedded_folder, embedded_statistics
    from keepset.paged.eviction import group_leader
    from keepset.recipe import Recipe
    from keepset.vllm import engine_args

    arguments, groups = {"enable_prefix_caching": True}, 1
    folder = embedded_folder()
    if recipe != "plain":
        recipe = recipe.replace("distilled", f"distilled(stats={str(embedded_statistics())!r})")
        layers, parsed = tuple(range(LAYERS)), Recipe.parse(recipe)
        groups = len({group_leader(parsed, layer, layers) for layer in layers})
        arguments = engine_args(recipe)
    return LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=min(8192, tokens),
        block_size=BLOCK,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=1 + -(-tokens // BLOCK) * groups,
        **arguments,
    ).llm_engine


def _chats(engine: Any, recipe: str, chats: int, turns: int, kind: str, seed: int) -> dict[str, Any]:
    """Return, turn by turn, tokens of prompts, those computed and new ones, and the time to the first token."""
    engine.reset_prefix_cache()
    draw = random.Random(seed)
    said: list[list[int]] = [[] for _ in range(chats)]
    spans: list[list[tuple[int, int]]] = [[] for _ in range(chats)]
    figures: dict[str, list[list[float]]] = {"prompt": [], "computed": [], "new": [], "first": []}
    start = time.process_time()
    for turn in range(turns):
        for figure in figures.values():
            figure.append([])
        for chat in range(chats):
            prompt, new = said[chat], SAID + RESULT * (kind == "cleared")
            if kind == "cleared":
                _clear(prompt, spans[chat], turn)
                spans[chat].append((len(prompt) + SAID, len(prompt) + SAID + RESULT))
            prompt += [draw.randrange(100, 40_000) for _ in range(new)]
            answer, cached, first = _ask(engine, f"{seed}-{chat}-{turn}", prompt)
            figures["prompt"][-1].append(len(prompt))
            figures["computed"][-1].append(len(prompt) - cached)
            figures["new"][-1].append(new + bool(turn))  # the last token of an answer is never computed with it
            figures["first"][-1].append(first)
            prompt += answer
            if kind == "thinking":  # the template strips all but the answer's end
                del prompt[-ANSWER : -ANSWER // 4]
    return {**figures, "seconds": time.process_time() - start, "held": _held(engine, recipe, said)}


def _clear(prompt: list[int], spans: list[tuple[int, int]], turn: int) -> None:
    """Take the result of the tool call three turns ago out of a prompt."""
    if turn < 3:
        return
    first, end = spans[turn - 3]
    del prompt[first:end]
    spans[:] = [(a - (end - first), b - (end - first)) if a >= end else (a, b) for a, b in spans]


def _ask(engine: Any, name: str, prompt: list[int]) -> tuple[list[int], int, float]:
    """Return an answer, how many tokens of the prompt were not computed, and the processor time to the first token."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    start, first, outputs = time.process_time(), 0.0, []
    engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
    while engine.has_unfinished_requests():
        outputs += engine.step()
        if outputs and not first:
            first = time.process_time() - start
    return list(outputs[-1].outputs[0].token_ids), outputs[-1].num_cached_tokens or 0, first


def _held(engine: Any, recipe: str, said: list[list[int]]) -> float:
    """Return how many tokens of a whole cache the pages of the conversations that are still there could hold, each."""
    if recipe == "plain":
        return sum(-(-len(tokens) // BLOCK) * BLOCK for tokens in said) / len(said)
    connector = engine.engine_core.engine_core.scheduler.connector
    there = {id(one): one for one in connector._conversations._by_hash.values()}.values()
    groups = len(connector._managers)
    return sum(len(one.real_blocks) for one in there) * BLOCK / groups / max(len(there), 1)


if __name__ == "__main__":
    main()
