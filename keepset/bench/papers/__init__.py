"""The tables and figures of four papers: AMS, KVCompose, GVote and CompilerKV, each as something that can be run."""
