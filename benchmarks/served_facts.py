"""Facts asked for after compression: by transformers, and by vLLM which loads the same contexts into 8-bit pages."""

import argparse
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from harness import progress
from harness.report import Section, machine, publish

from keepset import Cache, Recipe, models
from keepset.hf.prompt_session import Recorder
from keepset.lab.embedded import embedded_folder
from keepset.lab.generation import greedy
from keepset.lab.tasks.needle import NeedleTask
from keepset.lab.tasks.task import Example

RECIPE = "quantized(match(pool(distilled)), bits=8, bytes={share})"
SHARES = (0.5, 0.25, 0.1, 0.05)
TOKENS = 10


def main() -> None:
    """Compress, ask both runtimes, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, default=12, help="contexts with a fact each (default 12)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a context (default 1024)")
    args = parser.parse_args()
    model, tokenizer = models.load()
    task = NeedleTask(args.tokens)
    examples = task.examples(tokenizer, limit=args.contexts)
    answers: dict[tuple[float, str], dict[str, list[int]]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder, progress.bar() as bar:
        work = bar.add_task("contexts", total=len(examples))
        for example in examples:
            compressed(model, tokenizer, example, Path(folder), answers)
            bar.advance(work)
        bar.update(work, description="vLLM")
        served(tokenizer, examples, Path(folder), answers)
    rows, data = [], []
    for share in SHARES:
        found: dict[str, int] = defaultdict(int)
        for example in examples:
            for runtime, ids in answers[share, example.id].items():
                reply = tokenizer.decode(ids)
                found[runtime] += int(task.judge(example.questions[0], reply)["found"])
        same = sum(len({tuple(ids) for ids in answers[share, example.id].values()}) == 1 for example in examples)
        figures = {"share": share, **found, "same_answer": same, "contexts": len(examples)}
        data.append(figures)
        rows.append([str(share), str(found["transformers"]), str(found["vllm"]), f"{same} of {len(examples)}"])
    title = f"Facts found in {len(examples)} contexts of {args.tokens} tokens, {RECIPE.format(share='…')}"
    section = Section(title, ["bytes", "transformers", "vLLM", "same answer"], rows)
    publish("served_facts", [section], {"machine": machine(), "figures": data})


@torch.no_grad()
def compressed(model: Any, tokenizer: Any, example: Example, folder: Path, answers: dict[Any, Any]) -> None:
    """Compress a context under every budget from one prefill, save each, and have transformers answer."""
    recipes = {share: Recipe.parse(RECIPE.format(share=share)) for share in SHARES}
    ids = tokenizer(example.context, return_tensors="pt")["input_ids"]
    recorder = Recorder(model, recipes[SHARES[0]].method.traits.needs).prefill(ids)
    for share, recipe in recipes.items():
        cache = Cache.from_prompt(model, recipe, recorder, recorder.observations)
        cache.save(folder / f"{example.id}-{share}.safetensors", model_name=str(embedded_folder()))
        asked = cache.ask(torch.tensor([question(tokenizer, example)]))
        answers[share, example.id]["transformers"], _ = greedy(
            model, asked["past_key_values"], asked["input_ids"], TOKENS
        )


def served(tokenizer: Any, examples: list[Example], folder: Path, answers: dict[Any, Any]) -> None:
    """Have vLLM answer from the saved contexts."""
    from vllm import LLM, SamplingParams

    from keepset.vllm.settings import engine_args

    engine = LLM(
        model=str(embedded_folder()), dtype="float32", max_model_len=2048, block_size=32, enforce_eager=True,
        num_gpu_blocks_override=600, kv_cache_dtype="int8_per_token_head", **engine_args(contexts=folder),
    )  # fmt: skip
    for share in SHARES:
        for example in examples:
            extra = {"keepset": {"context": f"{example.id}-{share}"}}
            sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, extra_args=extra)
            prompt = {"prompt_token_ids": question(tokenizer, example)}
            (answer,) = engine.generate([prompt], sampling, use_tqdm=False)
            answers[share, example.id]["vllm"] = list(answer.outputs[0].token_ids)


def question(tokenizer: Any, example: Example) -> list[int]:
    """Return the tokens of a context's question, with the answer's opening."""
    (asked,) = example.questions
    return list(tokenizer(asked.text + asked.prefix, add_special_tokens=False)["input_ids"])


if __name__ == "__main__":
    main()
