"""CompilerKV's offline part, which compiles the tables of `compilerkv(tables=...)` from texts."""
