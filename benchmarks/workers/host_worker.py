"""One vLLM engine of a model of almost no arithmetic: the processor time of its steps, and what they call."""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from protocol import exchange, take_output

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

PROMPT, TOKENS = 160, 100
"""Tokens of each request: with more than a step of them before and after, nothing comes due."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("layers", type=int)
    parser.add_argument("requests", type=int)
    parser.add_argument("--threads")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = args.threads
    answers = take_output()
    with tempfile.TemporaryDirectory() as folder:
        engine, calls, numbers = _engine(args, Path(folder)), _Forward(), count()
        calls.watch(engine)

        def answer(asked: dict[str, Any]) -> dict[str, float]:
            if asked["what"] == "count":
                return _counted(engine, args.requests)
            return _timed(engine, args.requests, calls, next(numbers))

        exchange(answers, {}, answer)


def _engine(args: argparse.Namespace, folder: Path) -> Any:
    import torch
    import transformers
    from vllm import LLM

    from keepset.vllm.settings import engine_args

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=2048,
        block_size=32,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=args.requests,
        max_num_batched_tokens=8192,
        **{"enable_prefix_caching": False, **({} if args.recipe == "plain" else engine_args(args.recipe))},
    ).llm_engine


class _Forward:
    """The processor time of the model's own calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, engine: Any) -> None:
        runner = engine.model_executor.driver_worker.worker.model_runner
        forward = runner._model_forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return forward(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        runner._model_forward = timed


def _add(engine: Any, requests: int, name: str) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for request in range(requests):
        ids = [(request * 31 + 7 * token) % 254 + 1 for token in range(PROMPT)]
        engine.add_request(f"{name}-{request}", {"prompt_token_ids": ids}, sampling)


def _steps(engine: Any) -> Iterator[None]:
    """Yield before each step, and take it."""
    while engine.has_unfinished_requests():
        yield
        engine.step()


def _timed(engine: Any, requests: int, forward: _Forward, number: int) -> dict[str, float]:
    """Return medians in milliseconds of steps in which all requests decode."""
    _add(engine, requests, f"t{number}")
    whole, rest = [], []
    while engine.has_unfinished_requests():
        forward.seconds, start = 0.0, time.process_time()
        engine.step()
        whole.append((time.process_time() - start) * 1e3)
        rest.append(whole[-1] - forward.seconds * 1e3)
    half = slice(len(whole) - TOKENS + 10, -2)
    return {"step": median(whole[half]), "host": median(rest[half])}


def _counted(engine: Any, requests: int) -> dict[str, float]:
    """Return how many Python calls of keepset a step makes, as the median of ten."""
    import keepset

    root, made, counts = str(Path(keepset.__file__).parent), [0], []

    def note(frame: Any, event: str, _: Any) -> None:
        made[0] += event == "call" and frame.f_code.co_filename.startswith(root)

    _add(engine, requests, "c")
    for number, _ in enumerate(_steps(engine)):
        sys.setprofile(note if TOKENS // 2 <= number < TOKENS // 2 + 10 else None)
        if number > TOKENS // 2:
            counts.append(made[0])
        made[0] = 0
    sys.setprofile(None)
    return {"calls": median(counts[:10])}


if __name__ == "__main__":
    main()
