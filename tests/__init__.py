"""Tests of keepset; they mirror its folders."""

from tests import typecheck as typecheck
