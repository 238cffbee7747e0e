"""`python -m extproc` is the `tokenlane` command."""

from __future__ import annotations

from extproc.cli import main

if __name__ == "__main__":
    main(prog_name="tokenlane")
