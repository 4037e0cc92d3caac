"""The playground of `keepset ui`: one page on this machine, and its server."""
