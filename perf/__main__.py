"""The benchmarks by name: `python -m perf NAME`. Those of MEASUREMENTS are measured every night as well."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from components.config import UserError
from components.environment import configure_libraries


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a wrong input gives one sentence, and the exit status 2."""
    configure_libraries()  # before the first heavy import
    from perf.commands import app

    try:
        app(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
