"""One vLLM engine and one load: reads a case as JSON from its argument, prints its figures as one JSON line."""

import json
import os
import sys
import time
from itertools import pairwise
from statistics import median
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be within reach
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    case = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    from keepset.lab.embedded import embedded_folder, name_statistics
    from keepset.recipe import Recipe
    from keepset.vllm import stats
    from keepset.vllm.settings import engine_args

    recipe, blocks = case["recipe"] and Recipe.parse(case["recipe"]), case["blocks"]
    recipe = name_statistics(recipe, case["model"])
    engine = LLM(
        model=case["model"] or str(embedded_folder()),
        dtype=case["dtype"],
        max_model_len=case["max_model_len"],
        block_size=32,
        enforce_eager=True,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=blocks,
        **{"enable_prefix_caching": False, **(engine_args(recipe) if recipe else {})},
    )
    scheduler: Any = engine.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    steps: list[dict[str, Any]] = []
    preemptions = [0]
    update, preempt = scheduler.update_from_output, scheduler._preempt_request

    def watched(output: Any, *args: Any) -> Any:
        tokens = output.num_scheduled_tokens
        steps.append(
            {
                "time": time.perf_counter(),
                "running": len(tokens),
                "tokens": sum(tokens.values()),
                "free": pool.get_num_free_blocks(),
            }
        )
        return update(output, *args)

    def counted(*args: Any, **kwargs: Any) -> Any:
        preemptions[0] += 1
        return preempt(*args, **kwargs)

    scheduler.update_from_output, scheduler._preempt_request = watched, counted
    ids = engine.get_tokenizer()(case["text"])["input_ids"]
    prompt, output = case["prompt"], case["output"]
    prompts = [{"prompt_token_ids": ids[137 * i :][:prompt]} for i in range(case["requests"])]
    warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.generate([{"prompt_token_ids": ids[-64:]}], warm, use_tqdm=False)
    steps.clear()
    free, start = pool.get_num_free_blocks(), time.perf_counter()
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    whole = [(a, b) for a, b in pairwise(steps) if a["tokens"] == b["tokens"] == case["requests"]]
    print(
        json.dumps(
            {
                "tokens_per_second": case["requests"] * output / seconds,
                "running_mean": sum(step["running"] for step in steps) / len(steps),
                "running_max": max(step["running"] for step in steps),
                "preemptions": preemptions[0],
                "decode_step": median(b["time"] - a["time"] for a, b in whole) if whole else None,
                "free": [free, *(step["free"] for step in steps), pool.get_num_free_blocks()],
                "counters": stats.totals(),
            }
        )
    )


if __name__ == "__main__":
    main()
