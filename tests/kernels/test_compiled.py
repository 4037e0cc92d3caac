"""Kernels are compiled for GPUs, which takes none: Triton brings NVIDIA's assembler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full
pytest.importorskip("triton")

# Outside of the interpreter, which this process has turned on.
COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from keepset.kernels.triton import attention, columns, compaction, paged, paged_window, window

HEAD = dict(HEAD_DIM=128, HEAD_BLOCK=128)
WINDOW = dict(queries="*bf16", positions_kind="*i32", bias_kind="*fp32", scale_kind="*bf16", table="*i64",
              last_visible="*i64", scaling="fp32", partial="*fp32", column="*fp32")
PAGES = dict(block_table="*i32", counts="*i32", event_lengths="*i32", firsts="*i32", shares="*i32", places="*i64",
             rows="*i64", lengths="*i32")
FOLLOWED = ("block_table", "filed_counts", "filed_lengths", "filed_firsts", "filed_shares", "filed_tokens", "counts",
            "lengths", "firsts", "shares", "lost")
IN_PAGES = dict(kind="*bf16", addresses="*i64", rings="*bf16", slots="*i64", places="*i64", last_visible="*i64",
                bias="*fp32", positions="*fp32", block_table="*i32", counts="*i32", event_lengths="*i32", firsts="*i32",
                shares="*i32", packs="*i32", lengths="*i64", scaling="fp32", partial="*fp32")
PAGED = dict(HEADS=8, HEADS_BLOCK=8, SIZE=16, LISTED=True)
KERNELS = [
    *(
        (
            attention._attend_part,
            dict(queries="*bf16", keys_kind=of, values_kind=of, positions_kind="*i32", bias_kind="*fp32",
                 scale_kind="*bf16", table="*i64", query_positions="*i64", output="*fp32", lse="*fp32", scaling="fp32"),
            dict(GROUP=4, VALUE_DIM=128, VALUE_BLOCK=128, ROWS=16, BLOCK=64, CAUSAL=True, BIASED=True,
                 INT8=of == "*i8", ALIGNED=True, **HEAD),
        )
        for of in ("*bf16", "*i8")
    ),
    (
        attention._merge_parts,
        dict(partial="*fp32", partial_lse="*fp32", output="*bf16", lse="*fp32", places="*i64"),
        dict(VALUE_DIM=128, VALUE_BLOCK=128, BLOCK=16, LISTED=True),
    ),
    (
        columns._columns,
        dict(queries="*bf16", keys="*bf16", lse="*fp32", sums="*fp32", maxima="*fp32", squares="*fp32", scaling="fp32"),
        dict(MEMBERS=4, RULE=2, BLOCK=64, CAUSAL=True, SUM=True, MAX=True, SQUARE=True, **HEAD),
    ),
    (
        columns._log_sum_exp,
        dict(queries="*bf16", keys="*bf16", lse="*fp32", scaling="fp32"),
        dict(MEMBERS=4, BLOCK=64, CAUSAL=True, **HEAD),
    ),
    (
        compaction._pack,
        dict(columns=("*bf16", "*bf16", "*i32"), packed=("*bf16", "*bf16", "*i32"), indices="*i64", starts="*i64",
             counts="*i64", **{f"of_{axis}": ("i32",) * 3 for axis in ("request", "head", "entry", "number")}),
        dict(WIDTHS=(128, 128, 1), WIDE=(128, 128, 1), BLOCK=32),
    ),
    *(
        (
            compaction._append,
            dict(keys="*bf16", values="*bf16", positions="*i64", keys_kind=of, values_kind=of, positions_kind="*i32",
                 scale_kind="*bf16", table="*i64"),
            dict(WIDTH=128, WIDE=128, VALUE_WIDTH=128, VALUE_WIDE=128, BLOCK=32, INT8=of == "*i8", ALIGNED=True),
        )
        for of in ("*bf16", "*i8")
    ),
    *(
        (
            kernel,
            {**WINDOW, **more, "keys_kind": "*i8" if largest else "*bf16"},
            dict(TOKENS=4, WIDE=4, GROUP=4, ROWS=4 if largest else 16, BLOCK=64, LARGEST=largest, BIASED=True,
                 INT8=largest, ALIGNED=True, PARTS=16, **constants, **HEAD),
        )
        for kernel, more, constants, largest in (
            (window._window_lse, {}, {}, False),
            (window._window_lse, {}, {}, True),
            (window._add_received, dict(first_position="i64"), dict(MEAN=True, NUMBERS=1), False),
            (window._add_received, dict(first_position="i64"), dict(MEAN=False, NUMBERS=1), True),
            (window._add_received, dict(first_position="i64"), dict(MEAN=False, NUMBERS=4), False),
        )
    ),
    *(
        (
            kernel,
            {**IN_PAGES, **more},
            dict(TOKENS=4, WIDE=4, GROUP=4, ROWS=16, HEADS=8, HEADS_BLOCK=8, SIZE=16, BLOCK=64, LEAST_PART=256,
                 LARGEST=False, BIASED=True, PLACED=True, PARTS=16, **constants, **HEAD),
        )
        for kernel, more, constants in (
            (paged_window._paged_lse, {}, {}),
            *(
                (
                    paged_window._add_in_pages,
                    dict(column="*fp32", unwritten="*i64", owns="*i64"),
                    dict(OWN=own, MEAN=numbers == 1, NUMBERS=numbers),
                )
                for own, numbers in ((False, 1), (True, 1), (True, 4))
            ),
        )
    ),
    *(
        (
            paged._attend_pages,
            dict(queries=f"*{of}", cache=f"*{of}", caches="*i64", bias="*fp32", output="*fp32", lse="*fp32",
                 scaling="fp32", **PAGES),
            dict(GROUP=4, ROWS=16, BLOCK=64, LEAST_PART=256, BIASED=True, SPLIT=True, **PAGED, **HEAD),
        )
        for of in ("bf16", "fp32")
    ),
    (
        paged._append_to_pages,
        dict(keys="*bf16", values="*bf16", cache="*bf16", slots="*i64", **PAGES),
        dict(PAGED, GUARDED=True, **HEAD),
    ),
    (
        paged._follow,
        dict(before="*i64", after="*i64", required="*i64", pages="*i64", **dict.fromkeys(FOLLOWED, "*i32")),
        dict(COUNTS=256, LAYERS=32, SIZE=16, BLOCK=128),
    ),
]
for kernel, types, constants in KERNELS:
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    for capability in (80, 90, 100):
        made = compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", capability, 32))
        print(kernel.__name__, capability, made.metadata.shared, len(made.asm["cubin"]))
"""


def test_for_all_compute_capabilities() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # takes a part of the time
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[1] for line in lines] == ["80", "90", "100"] * 21
    # What a multiprocessor of the smallest of them has.
    assert all(int(shared) <= 163 * 1024 and int(size) > 0 for *_, shared, size in lines)
