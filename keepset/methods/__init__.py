"""Scorers, one file each; `keepset.registry` lists them."""
