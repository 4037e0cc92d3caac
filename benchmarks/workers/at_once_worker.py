"""One vLLM engine with many requests: reads a case as JSON from its argument, prints how many ran at once."""

import json
import os
import random
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be within reach
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

BLOCK = 32


def main() -> None:
    case = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    from keepset.recipe import Recipe
    from keepset.vllm.settings import engine_args

    prompt, output, whole = case["prompt"], case["output"], case["whole"]
    blocks = whole * -(-(prompt + output) // BLOCK) + 1  # vLLM keeps one for itself
    layers, kv_heads, head_dim, bytes_each = 2, 2, 128, 2
    pool_bytes = blocks * BLOCK * layers * kv_heads * 2 * head_dim * bytes_each
    recipe = case["recipe"] and Recipe.parse(case["recipe"])
    options = {"enable_prefix_caching": False, "kv_cache_dtype": case["cache"]}
    engine = LLM(
        model=case["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2 * prompt,
        block_size=BLOCK,
        enforce_eager=True,
        max_num_seqs=512,
        max_num_batched_tokens=2 * prompt,
        kv_cache_memory_bytes=pool_bytes,
        **{**options, **(engine_args(recipe) if recipe else {})},
    )
    scheduler: Any = engine.llm_engine.engine_core.engine_core.scheduler
    steps: list[tuple[int, int]] = []
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        planned = schedule(*args, **kwargs)
        steps.append((len(scheduler.running), len(scheduler.waiting)))
        return planned

    scheduler.schedule = watched
    draw = random.Random(0)
    # Enough requests to keep the pool full for a while.
    prompts = [{"prompt_token_ids": [draw.randrange(512) for _ in range(prompt)]} for _ in range(12 * whole)]
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    engine.generate(prompts, sampling, use_tqdm=False)
    waited = [running for running, waiting in steps if waiting] or [running for running, _ in steps]
    print(
        json.dumps(
            {
                "blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
                "most": max(running for running, _ in steps),
                "mean": sum(waited) / len(waited),
            }
        )
    )


if __name__ == "__main__":
    main()
