"""Access to lm-evaluation-harness and its libraries: imports that explain themselves, and seeded generators."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import numpy as np

from keepset.errors import KeepsetError


def import_extra(module: str) -> ModuleType:
    """Return a module that `keepset[eval]` installs.

    Raises:
        KeepsetError: if it cannot be imported.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about packages that no user of keepset asked for
            return import_module(module)
    except ImportError as error:
        raise KeepsetError(
            f"This task needs {module.partition('.')[0]}, which cannot be imported ({error}): run "
            '`pip install "keepset[eval]"`.'
        ) from error


@contextmanager
def seeded(seed: int | str, numpy_seed: int | None = None) -> Iterator[None]:
    """Seed the generators of `random` and `numpy`, from which the harness draws, and restore them afterwards.

    Args:
        seed: the seed of `random`.
        numpy_seed: the seed of `numpy`; drawn from `random` if None.
    """
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(random.getrandbits(32) if numpy_seed is None else numpy_seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
