"""`python -m tests.hf.contract [--write] [TYPE ...]`: what keepset does with each model type of transformers."""

from __future__ import annotations

import sys
import warnings

import torch
from transformers import logging

from tests.hf.contract.builds import KINDS, NOT_BUILT, build
from tests.hf.contract.check import Row, check, told
from tests.hf.contract.page import PAGE, page


def main(arguments: list[str]) -> int:
    """Check types and print what is found; with `--write` check all and write the page."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: dict[str, Row] = {}
    for kind in [argument for argument in arguments if not argument.startswith("-")] or KINDS:
        if kind in NOT_BUILT:
            continue
        try:
            rows[kind] = check(kind, build(kind))
        except Exception as error:
            rows[kind] = Row(kind, findings={"making it": told(error)})
        print(rows[kind], flush=True)
    if "--write" in arguments:
        PAGE.write_text(page(rows), encoding="utf-8")
    wrong = [kind for kind, row in rows.items() if row.findings]
    print(f"{len(rows)} types, {len(wrong)} with findings: {' '.join(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
