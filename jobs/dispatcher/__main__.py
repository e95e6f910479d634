"""`python -m jobs.dispatcher`."""

from __future__ import annotations

from jobs.dispatcher.loop import main

if __name__ == "__main__":
    main()
