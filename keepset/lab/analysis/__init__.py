"""From KeepSets and records to figures: diagnostics, traces, intervals, rows, curves, needle maps."""
