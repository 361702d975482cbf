"""`python -m leangrpo` is the command line."""

from __future__ import annotations

from leangrpo.cli import main

if __name__ == "__main__":
    main()
