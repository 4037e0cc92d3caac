"""KL to the full cache after compression: under transformers, and in vLLM from the same contexts or from prompts."""

from __future__ import annotations

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
from torch import Tensor

from keepset import Cache, Recipe, models
from keepset.hf.prompt_session import Recorder
from keepset.lab import texts
from keepset.lab.analysis import intervals
from keepset.lab.embedded import embedded_folder, embedded_statistics

RECIPE = "quantized(match(pool(distilled(stats='{stats}')), newest={newest}), bits={bits}, bytes={share})"
WHOLE = 1.0
"""The budget of requests that keep everything."""
FORCED = "forced"
"""The key of a request's extra arguments: the tokens that it must generate, whatever the model predicts."""


def main() -> None:
    """Compress, score the text that follows in all runtimes, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--essays", default="gap,philosophy,worked,langdes,useful,boss", help="their names")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt (default 2048)")
    parser.add_argument("--continuation", type=int, default=256, help="tokens after it (default 256)")
    parser.add_argument("--bits", type=int, default=8, choices=(8, 4), help="bits of an entry's numbers (default 8)")
    parser.add_argument("--newest", type=int, default=128, help="newest queries that match fits to (default 128)")
    parser.add_argument("--shares", default="0.5,0.25,0.1,0.05", help="the budgets, as shares of a full cache's bytes")
    parser.add_argument("--prompts", action="store_true", help="vLLM compresses prompts itself, and loads no contexts")
    args = parser.parse_args()
    names, shares = args.essays.split(","), [float(share) for share in args.shares.split(",")]
    model, tokenizer = models.load()
    given = {"bits": args.bits, "newest": args.newest}
    recipes = {share: RECIPE.format(stats=embedded_statistics(), share=share, **given) for share in shares}
    full: dict[str, Tensor] = {}
    texts_of: dict[str, tuple[list[int], list[int]]] = {}
    kl: dict[tuple[float, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, progress.bar() as bar:
        work = bar.add_task("transformers", total=len(names) + 1)
        for name in names:
            ids = tokenizer(texts.essay(name), return_tensors="pt")["input_ids"][:, : args.tokens + args.continuation]
            prompt, rest = ids[:, : args.tokens], ids[:, args.tokens :]
            full[name] = transformers(model, recipes, name, prompt, rest, Path(folder), kl)
            texts_of[name] = prompt[0].tolist(), rest[0].tolist()
            bar.advance(work)
        bar.update(work, description="vLLM")
        said = served(recipes, texts_of, Path(folder), from_prompts=args.prompts)
        for (share, name), logits in said.items():
            kl[share, "vLLM"].append(divergence(full[name], logits))
        bar.advance(work)
    rows = []
    for share in [*shares, *([WHOLE] if args.prompts else [])]:
        row = ["nothing is dropped" if share == WHOLE else str(share)]
        for runtime in ("transformers", "vLLM"):
            values = kl[share, runtime] or [0.0] * len(names)
            interval = intervals.of_mean(values)
            around = "" if interval is None or interval.low is None else f" ({interval.low:.4f}..{interval.high:.4f})"
            row.append(f"{sum(values) / len(values):.4f}{around}")
        rows.append(row)
    shown = RECIPE.format(stats="…", share="…", **given)
    title = f"KL over {args.continuation - 1} tokens after {args.tokens}, {len(names)} essays, {shown}"
    section = Section(
        title, ["bytes", "transformers", "vLLM from prompts" if args.prompts else "vLLM from contexts"], rows
    )
    data = [{"share": share, "runtime": runtime, "kl": values} for (share, runtime), values in kl.items()]
    publish("served_fidelity", [section], {"machine": machine(), **given, "essays": names, "figures": data})


@torch.no_grad()
def transformers(
    model: Any,
    recipes: dict[float, str],
    name: str,
    prompt: Tensor,
    rest: Tensor,
    folder: Path,
    kl: dict[tuple[float, str], list[float]],
) -> Tensor:
    """Compress a prompt under every budget from one prefill, save each, and score the text that follows.

    Returns:
        The logarithms of the full cache's probabilities, `[tokens - 1, vocabulary]`.
    """
    model.set_attn_implementation("sdpa")
    logits = model(torch.cat([prompt, rest], 1)).logits[0, prompt.shape[1] : -1]
    right = logits.log_softmax(-1)
    parsed = {share: Recipe.parse(recipe) for share, recipe in recipes.items()}
    recorder = Recorder(model, next(iter(parsed.values())).method.traits.needs).prefill(prompt)
    for share, recipe in parsed.items():
        cache = Cache.from_prompt(model, recipe, recorder, recorder.observations)
        cache.save(folder / f"{name}-{share}.safetensors", model_name=str(embedded_folder()))
        said = model(past_key_values=cache, input_ids=rest, use_cache=True).logits[0, :-1]
        kl[share, "transformers"].append(divergence(right, said))
    return right


def served(
    recipes: dict[float, str], texts_of: dict[str, tuple[list[int], list[int]]], folder: Path, from_prompts: bool
) -> dict[tuple[float, str], Tensor]:
    """Make vLLM generate the text that follows, after each saved context or after prompts that it compresses itself.

    Prompts are also left whole, which shows what their pages lose.

    Returns:
        The logits that it chose from, `[tokens - 1, vocabulary]`, by budget and essay.
    """
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    from keepset.vllm.settings import engine_args

    seen: dict[tuple[float, str], list[Tensor]] = defaultdict(list)

    class Forced(AdapterLogitsProcessor):
        """Records a request's logits, and forces its next token."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            extra = params.extra_args or {}

            def note(said: list[int], logits: Tensor) -> Tensor:
                seen[extra["share"], extra["name"]].append(logits.clone())
                return torch.full_like(logits, float("-inf")).index_fill_(
                    0, torch.tensor(extra[FORCED][len(said)]), 0.0
                )

            return note

    recipe = next(iter(recipes.values()))
    kind = engine_args(recipe)["kv_cache_dtype"]
    args = engine_args(recipe) if from_prompts else engine_args(contexts=folder)
    engine = LLM(
        model=str(embedded_folder()), dtype="float32", max_model_len=4096, block_size=32, enforce_eager=True,
        num_gpu_blocks_override=1600, logits_processors=[Forced], **args | {"kv_cache_dtype": kind},
    )  # fmt: skip
    prompts, sampling = [], []
    for share in [*recipes, *([WHOLE] if from_prompts else [])]:
        for name, (prompt, (first, *others)) in texts_of.items():
            if from_prompts:
                # The token after the prompt is generated first, and its logits are not scored.
                options = {"off": True} if share == WHOLE else {"bytes": share}
                ids, forced = prompt, [first, *others]
            else:
                # The last token is scored but not generated; a further token has to follow it.
                ids, options, forced = [first], {"context": f"{name}-{share}"}, [*others, first]
            extra = {"keepset": options, "name": name, "share": share, FORCED: forced}
            prompts.append({"prompt_token_ids": ids})
            tokens = len(others) + from_prompts
            sampling.append(SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra))
    engine.generate(prompts, sampling, use_tqdm=False)
    return {key: torch.stack(logits[int(from_prompts) :]) for key, logits in seen.items()}


def divergence(right: Tensor, logits: Tensor) -> float:
    """Return the mean KL of the full cache's probabilities to those of some logits, in nats."""
    said = logits.float().log_softmax(-1)
    return float((right.exp() * (right - said)).sum(-1).mean())


if __name__ == "__main__":
    main()
