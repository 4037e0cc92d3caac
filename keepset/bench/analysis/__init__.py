"""What KeepSets and a sweep's cells come to: diagnostics, traces, intervals, tables, curves, needle maps."""
