"""The tables and figures of four papers, AMS, KVCompose, GVote and CompilerKV, as entries that can be run."""
