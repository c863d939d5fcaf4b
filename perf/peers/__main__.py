"""The project beside Flower and TRL, on equal work.

    python -m perf.peers [--recipe NAME] [--rounds 1] [--pairs 3] [--only flower|trl]
                            [--clients-at-once 1]

1. A round of FedBis through the flow (Prefect's tasks, commits, MLflow logging), against a Flower app
   that loads the model for each message and computes all logits, and against the same app with a
   cached model that computes two rows of the head at the answer position.
2. A client of FedDPO with the resident model, against a new DPOTrainer of TRL that loads the model.

The peers run in an environment of their own, which the first call installs from PyPI
(requirements.txt). All programs read the same token rows, minibatches and initial adapter, and their
first losses must be equal. Each runs in a process of its own, in turn; start-up, data and the first
round or client are not timed. The recipe's dropout is switched off, and the processor is used.

Ratios of neighboring runs are printed, because the machine's speed drifts. Nothing is measured
beside other work, unless --beside-others is set.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from components.config import UserError
from components.environment import configure_libraries
from perf.comparison import Comparison, check_load


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; gives the exit status."""
    options = _parse(arguments)
    if min(options.rounds, options.pairs, options.clients_at_once) < 1:
        print("error: --rounds, --pairs and --clients-at-once must be at least 1", file=sys.stderr)
        return 2
    configure_libraries()
    if options.measure:
        _measure(options.measure, options.exchange)
        return 0
    try:
        if not options.beside_others:
            check_load()
        _compare(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.peers", description="Speed beside Flower and TRL, as tables."
    )
    parser.add_argument("--recipe", default="summarization/demo", help="default: summarization/demo")
    parser.add_argument("--rounds", type=int, default=1, help="timed federated rounds of a run")
    parser.add_argument("--pairs", type=int, default=3, help="timed runs of each kind")
    parser.add_argument(
        "--clients-at-once", type=int, default=1, help="clients of a round that train concurrently"
    )
    parser.add_argument("--only", choices=("flower", "trl"), help="compare with one of them")
    parser.add_argument(
        "--beside-others", action="store_true", help="measure even if the machine has other work"
    )
    parser.add_argument("--measure", choices=("rounds", "clients"), help=argparse.SUPPRESS)
    parser.add_argument("--exchange", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _compare(options: argparse.Namespace) -> None:
    from perf.peers.comparisons import compare_flower, compare_trl

    comparison = Comparison(options.recipe, options.pairs)
    if options.only != "trl":
        compare_flower(comparison, options.rounds, options.clients_at_once)
    if options.only != "flower":
        compare_trl(comparison)


def _measure(kind: str, folder: Path) -> None:
    """Print the times of the project's own work as JSON."""
    from perf.peers.own import time_clients, time_rounds

    work = time_rounds(folder) if kind == "rounds" else time_clients(folder)
    print(json.dumps([asdict(part) for part in work]))


if __name__ == "__main__":
    raise SystemExit(main())
