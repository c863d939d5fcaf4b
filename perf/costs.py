"""The costs of orchestration, and of computations for which the project has a faster way.

    python -m perf.costs [--recipe NAME] [--rounds 3] [--pairs 3]
    python -m perf.costs --policy
    python -m perf.costs --objectives
    python -m perf.costs --threads

1. A training step of the selector that computes its last layer and two rows of the head at the
   answer position, in concurrent parts and in one, against the same step with the whole last layer,
   and with all logits. Each runs in a process of its own, so that each has a peak memory of its own.
   The share of the GEMM rate is that of the step's matrix products and attention, against one large
   product in the same process.
2. The same federated rounds through the flow (Prefect's mapping, MLflow logging) and as a loop over
   the same components, alternating in one process. Start-up, data and the loading of the model are
   not timed.

With --policy instead: completions in a continuous batch, in batches of transformers' `generate`, and
with a separate adapter. With --objectives: a local step of FIRM with
one, two and three objectives, and a solution of MGDA with and without a solver. With --threads: a
step of the selector by how threads wait for each other, alone and beside a busy process.

Ratios of neighboring runs are printed, because the machine's speed drifts. Nothing is measured
beside other work, unless --beside-others is set.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from components.config import UserError
from components.environment import configure_libraries
from perf.comparison import Comparison, check_load
from perf.selector_costs import ARMS, compare_steps, time_step


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; gives the exit status."""
    options = _parse(arguments)
    if min(options.rounds, options.pairs) < 1:
        print("error: --rounds and --pairs must be at least 1", file=sys.stderr)
        return 2
    configure_libraries()
    recipe = options.recipe or ("multi-objective/demo" if options.objectives else "summarization/demo")
    comparison = Comparison(recipe, options.pairs)
    if options.arm is None and not options.beside_others:
        try:
            check_load()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if options.arm:
        print(json.dumps(time_step(recipe, options.arm)))
    elif options.objectives:
        from perf.objective_costs import compare_objectives, compare_solvers

        compare_objectives(comparison)
        compare_solvers(options.pairs)
    elif options.threads:
        from perf.thread_costs import compare_waiting

        compare_waiting(comparison)
    elif options.policy:
        from perf.policy_costs import compare_generation

        compare_generation(comparison)
    else:
        from perf.orchestration import compare_orchestration

        compare_steps(comparison)
        compare_orchestration(comparison, options.rounds)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.costs", description="Costs of orchestration and of the selector, as tables."
    )
    parser.add_argument(
        "--recipe", help="default: summarization/demo; with --objectives multi-objective/demo"
    )
    parser.add_argument(
        "--objectives", action="store_true", help="measure several objectives instead of the selector"
    )
    parser.add_argument("--policy", action="store_true", help="measure the policy instead of the selector")
    parser.add_argument("--threads", action="store_true", help="measure how threads wait for each other")
    parser.add_argument(
        "--beside-others", action="store_true", help="measure even if the machine has other work"
    )
    parser.add_argument("--rounds", type=int, default=3, help="federated rounds of a timed run")
    parser.add_argument("--pairs", type=int, default=3, help="timed runs of each kind")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
