"""`python -m keepset`: the command line."""

from keepset.lab.cli import main

if __name__ == "__main__":
    main()
