"""The benchmarks by name: `python -m perf NAME`. Those of MEASUREMENTS are measured every night as well."""

from __future__ import annotations

from collections.abc import Sequence

from flows.process import exit_status


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a wrong input gives one sentence, and the exit status 2."""

    def call() -> int:
        from perf.commands import app  # after exit_status has set the variables of libraries

        app(arguments)
        return 0

    raise SystemExit(exit_status(call))


if __name__ == "__main__":
    main()
