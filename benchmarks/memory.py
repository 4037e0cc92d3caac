"""Bytes of a compressed cache, the peak bytes of its prefill, and the speed of decoding."""

import sys
from contextlib import ExitStack

from harness import decoding, holding, options, progress
from harness.prompt import prepared
from harness.report import machine, publish
from harness.worker import WorkerError, start_workers


def main() -> int:
    """Measure, show, write; fail if a measurement of keepset failed."""
    parser = options.parser(__doc__ or "", repeats=7)
    parser.add_argument("--steps", type=int, default=32, help="decode steps in a round (default 32)")
    args = parser.parse_args()
    needed = decoding.tokens_needed(args.tokens, args.repeats, args.steps)

    held: holding.Table = {}
    decoded = decoding.Table()
    with ExitStack() as stack:
        prompt = stack.enter_context(prepared(args.model, needed))
        workers = start_workers(stack, prompt, args.threads, args.peer)
        versions = {worker.name: worker.versions for worker in workers}
        try:
            with progress.bar() as bar:
                total = decoding.planned(workers, args.tokens, args.repeats, args.steps)
                task = bar.add_task("bytes", total=total + holding.planned(workers, args.tokens))
                for weight in holding.measure(held, workers, args.tokens):
                    bar.advance(task, weight)
                bar.update(task, description="decoding")
                for weight in decoding.measure(decoded, workers, args.tokens, args.repeats, args.steps):
                    bar.advance(task, weight)
        except KeyboardInterrupt:
            print("interrupted: what is done follows", file=sys.stderr)

    settings = {"tokens": args.tokens, "repeats": args.repeats, "steps": args.steps, "threads": args.threads}
    bytes_rows, decode_rows = holding.rows(held), decoding.rows(decoded)
    data = {
        "machine": machine(),
        "versions": versions,
        "settings": settings,
        "bytes": bytes_rows,
        "decode": decode_rows,
    }
    sections = [
        holding.held(held, args.tokens),
        holding.peak(held, args.tokens),
        holding.whole(held, args.tokens),
        decoding.section(decoded, args.tokens),
    ]
    publish("memory", sections, data)
    failed = [row for row in bytes_rows + decode_rows if row["side"] == "keepset" and row.get("error")]
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkerError as error:
        sys.exit(str(error))
