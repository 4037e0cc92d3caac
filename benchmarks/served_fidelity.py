"""KL to the full cache after compression: under transformers, and in vLLM, which loads the same contexts."""

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

from keepset import Cache, Recipe, models, texts
from keepset.bench.analysis import intervals
from keepset.hf.prompt_session import Recorder
from keepset.models import embedded_folder

RECIPE = "quantized(match(pool(distilled)), bits=8, bytes={share})"
SHARES = (0.5, 0.25, 0.1, 0.05)
FORCED = "forced"
"""The key of a request's extra arguments: the tokens that it says, whatever the model would say."""


def main() -> None:
    """Compress, score the text that follows in both runtimes, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--essays", default="gap,philosophy,worked,langdes,useful,boss", help="their names")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt (default 2048)")
    parser.add_argument("--continuation", type=int, default=256, help="tokens after it (default 256)")
    args = parser.parse_args()
    names = args.essays.split(",")
    model, tokenizer = models.load()
    full: dict[str, Tensor] = {}
    following: dict[str, list[int]] = {}
    kl: dict[tuple[float, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, progress.bar() as bar:
        work = bar.add_task("transformers", total=len(names) + 1)
        for name in names:
            ids = tokenizer(texts.essay(name), return_tensors="pt")["input_ids"][:, : args.tokens + args.continuation]
            prompt, rest = ids[:, : args.tokens], ids[:, args.tokens :]
            full[name], following[name] = transformers(model, name, prompt, rest, Path(folder), kl), rest[0].tolist()
            bar.advance(work)
        bar.update(work, description="vLLM")
        served(full, following, Path(folder), kl)
        bar.advance(work)
    rows = []
    for share in SHARES:
        row = [str(share)]
        for runtime in ("transformers", "vLLM"):
            values = kl[share, runtime]
            interval = intervals.of_mean(values)
            around = "" if interval is None else f" ({interval.low:.4f}..{interval.high:.4f})"
            row.append(f"{sum(values) / len(values):.4f}{around}")
        rows.append(row)
    title = f"KL over {args.continuation - 1} tokens after {args.tokens}, {len(names)} essays, {RECIPE}"
    section = Section(title, ["bytes", "transformers", "vLLM"], rows)
    data = [{"share": share, "runtime": runtime, "kl": values} for (share, runtime), values in kl.items()]
    publish("served_fidelity", [section], {"machine": machine(), "essays": names, "figures": data})


@torch.no_grad()
def transformers(model: Any, name: str, prompt: Tensor, rest: Tensor, folder: Path, kl: dict[Any, Any]) -> Tensor:
    """Compress a prompt under every budget from one prefill, save each, and score the text that follows.

    Returns:
        The logarithms of the full cache's probabilities, `[tokens - 1, vocabulary]`.
    """
    model.set_attn_implementation("sdpa")
    logits = model(torch.cat([prompt, rest], 1)).logits[0, prompt.shape[1] : -1]
    right = logits.log_softmax(-1)
    recipes = {share: Recipe.parse(RECIPE.format(share=share)) for share in SHARES}
    recorder = Recorder(model, recipes[SHARES[0]].method.traits.needs).prefill(prompt)
    for share, recipe in recipes.items():
        cache = Cache.from_prompt(model, recipe, recorder, recorder.observations)
        cache.save(folder / f"{name}-{share}.safetensors", model_name=str(embedded_folder()))
        said = model(past_key_values=cache, input_ids=rest, use_cache=True).logits[0, :-1]
        kl[share, "transformers"].append(divergence(right, said))
    return right


def served(
    full: dict[str, Tensor], following: dict[str, list[int]], folder: Path, kl: dict[tuple[float, str], list[float]]
) -> None:
    """Have vLLM say the same text after each context, and score it by the logits that it chose from."""
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    from keepset.vllm import engine_args

    seen: dict[str, list[Tensor]] = defaultdict(list)

    class Forced(AdapterLogitsProcessor):
        """Notes a request's logits, and leaves it one token to choose."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            extra = params.extra_args or {}

            def note(said: list[int], logits: Tensor) -> Tensor:
                seen[extra["name"]].append(logits.clone())
                return torch.full_like(logits, float("-inf")).index_fill_(
                    0, torch.tensor(extra[FORCED][len(said)]), 0.0
                )

            return note

    longest = max(map(len, following.values()))
    engine = LLM(
        model=str(embedded_folder()), dtype="float32", max_model_len=4096, block_size=32, enforce_eager=True,
        num_gpu_blocks_override=1600, kv_cache_dtype="int8_per_token_head", logits_processors=[Forced],
        **engine_args(contexts=folder),
    )  # fmt: skip
    jobs = [(share, name) for share in SHARES for name in full]
    prompts, sampling = [], []
    for share, name in jobs:
        first, *others = following[name]
        # The last token is scored and not said: something has to follow it.
        extra = {"keepset": {"context": f"{name}-{share}"}, "name": f"{name}-{share}", FORCED: [*others, first]}
        prompts.append({"prompt_token_ids": [first]})
        sampling.append(SamplingParams(temperature=0, max_tokens=longest - 1, ignore_eos=True, extra_args=extra))
    engine.generate(prompts, sampling, use_tqdm=False)
    for share, name in jobs:
        kl[share, "vLLM"].append(divergence(full[name], torch.stack(seen[f"{name}-{share}"])[: len(full[name])]))


def divergence(right: Tensor, logits: Tensor) -> float:
    """Return the mean KL of the full cache's probabilities to those of some logits, in nats."""
    said = logits.float().log_softmax(-1)
    return float((right.exp() * (right - said)).sum(-1).mean())


if __name__ == "__main__":
    main()
