"""What people read: HTML pages, each one file that needs nothing else."""
