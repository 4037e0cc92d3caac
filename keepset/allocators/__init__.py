"""Allocators: how a budget is divided over layers and heads."""
