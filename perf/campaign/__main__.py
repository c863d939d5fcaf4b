"""Experiments that take hours, in the background: `python -m perf.campaign run`, status, pause, ...

It works through families.yaml in this folder, see CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from components.io import read_json
from components.paths import PACKAGE
from flows.process import exit_status
from perf.campaign.lines import FAILED, FINISHED, RUN, collect
from perf.campaign.plan import LIST, Campaign, check_campaign, items, read_campaign
from perf.campaign.worker import (
    Place,
    Worker,
    family_benchmark,
    is_running,
    last_statuses,
    locked,
    lower_priority,
    signal_group,
)

COMMANDS = {
    "run": "work through the list; what is finished or failed is skipped, what was killed is resumed",
    "check": "check the list and the recipe of every arm",
    "status": "numbers of finished and failed runs, and what runs now",
    "pause": "start no further run; with --now stop the processes at once",
    "continue": "take back pause",
    "collect": "copy the lines of finished runs into docs/results/data/ of CHECKOUT",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:10}{text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("checkout", nargs="?", type=Path, help="of collect (default: this one)")
    parser.add_argument("--list", type=Path, default=LIST, help="of families (default: %(default)s)")
    parser.add_argument("--home", type=Path, default=PACKAGE / "campaign", help="default: %(default)s")
    parser.add_argument("--retry-failed", action="store_true", help="resume failed runs too")
    parser.add_argument("--now", action="store_true", help="pause in the middle of a run")
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: _command(parsed))


def _command(parsed: argparse.Namespace) -> int:
    place = Place(parsed.home.expanduser().resolve())
    if parsed.command == "pause":
        return _pause(place, parsed.now)
    if parsed.command == "continue":
        return _continue(place)
    if parsed.command == "collect":
        for family, count in collect(place.lines, (parsed.checkout or PACKAGE).resolve()).items():
            print(f"{family}: {count} new lines")
        return 0
    campaign = read_campaign(parsed.list.resolve(), place.home)
    if parsed.command == "run":
        return _run(campaign, place, parsed.retry_failed)
    if parsed.command == "check":
        for family, count in check_campaign(campaign).items():
            print(f"{family}: {count} runs")
        return 0
    print(status(campaign, place))
    return 0


def _run(campaign: Campaign, place: Place, retry_failed: bool) -> int:
    lower_priority()
    place.enter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with locked(place) as lock:
        check_campaign(campaign)
        Worker(campaign, place, lock, retry_failed).work()
    return 0


def _pause(place: Place, now: bool) -> int:
    place.home.mkdir(parents=True, exist_ok=True)
    if now:
        signal_group(place, signal.SIGSTOP)
    else:
        place.pause.touch()
    return 0


def _continue(place: Place) -> int:
    place.pause.unlink(missing_ok=True)
    if is_running(place):
        signal_group(place, signal.SIGCONT)
    return 0


def status(campaign: Campaign, place: Place) -> str:
    """A line for each family, and what runs now."""
    rows = []
    for name, family in campaign.families.items():
        if family.disabled:
            rows.append(f"{name}: disabled, {family.disabled}")
            continue
        benchmark = family_benchmark(campaign, place, name)
        plan = benchmark or campaign.benchmark(name)
        statuses = last_statuses(place, name)
        runs = [statuses.get((RUN, item.arm, item.seed)) for item in items(name, plan)]
        waiting = "" if benchmark else f", waits for the choices of {family.chosen_from}"
        counts = f"{runs.count(FINISHED)} of {len(runs)} runs finished, {runs.count(FAILED)} failed"
        rows.append(f"{name}: {counts}{waiting}")
    if is_running(place) and place.state.is_file():
        state = read_json(place.state)
        paused = " (paused after it)" if place.pause.exists() else ""
        rows.append(f"process {state['pid']}: {state['running'] or 'no run'}, since {state['since']}{paused}")
    else:
        rows.append("no process works on it")
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
