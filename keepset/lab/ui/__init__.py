"""The playground of `keepset ui`: a page on this machine, and its server."""
