"""Options are told from mistyped ones by vLLM's sources, which its own parser must agree with."""

from __future__ import annotations

import importlib.util

import pytest

from keepset.serving.spelling import check_spelling

pytestmark = pytest.mark.full  # to import the parser takes as long as what is spared by not importing it


def test_every_option_of_vllms_is_one() -> None:
    places = "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args"  # of 0.32, of 0.33
    there = next(place for place in places if importlib.util.find_spec(place))
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    options = importlib.import_module(there).make_arg_parser(parser)._option_string_actions
    assert len(options) > 300
    check_spelling([option for option in options if option.startswith("--")])
