"""CompilerKV's offline part: from texts to the tables that `compilerkv(tables=...)` looks things up in."""
