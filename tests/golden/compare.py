"""Compare the results of two commits, bit by bit, on this machine.

    python -m tests.golden.compare BASE [HEAD] [--only VARIANT ...] [--jobs 2]

Each commit is checked out into a scratch folder, and the recipe `debug` runs there through the flow
with every entry of that commit's tests/golden/variants.yaml. Compared are the values of every
adapter of every round, of every client's private modules, of the aligned policy, and every MLflow
metric at every step, timings excepted. What both commits keep has to be equal; variants, adapters and
metrics that only one of them has are named. HEAD is the working tree where it is left out. Results
depend on the processor and on the versions of the libraries, so both commits run here, in the same
environment. The exit status is 0 where all compared results of BASE are those of HEAD, or where the
variable RESULTS_CHANGED is set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = Path("tests/golden/variants.yaml")
RENAMED_METRICS: tuple[tuple[str, str], ...] = (
    (r"^accuracy\.(before|after)\.rewards/", r"measures.\1.rewards."),
    (r"(^|[./_])raw([./_])", r"\1base\2"),
    (r"/own/loss$", "/personal/loss"),
    (r"^graph/neighbours$", "graph/neighbors"),
    # Names with dots were those of metrics.json at the parent run.
    (r"^accuracy\.(\w+)\.accuracy_assigned/", r"\1/accuracy_assigned/"),
    (r"^accuracy\.best\.round$", "best/round"),
    (r"^accuracy\.(before|after|best)\.", r"\1/accuracy/"),
    (r"^measures\.(before|after)\.(\w+)\.", r"\1/\2/"),
    (r"^win_rate\.(\w+)\.single_order\.", r"\1/single_order/"),
    (r"^win_rate\.(\w+)\.", r"\1/"),
    (r"^questions\.(\w+)\.(\w+)\.", r"questions/\1/\2/"),
    (r"^rouge\.(\w+)\.", r"rouge/\1/"),
    (r"^kl\.", "align/kl_"),
    (r"^judge\.", "judge/"),
)
"""Renamed metrics: a regular expression of the old name, and its replacement."""

Digest = dict[str, Any]
"""Of one run: `server`, `clients` and `policy`, sorted hashes of adapters by content.

`metrics`, values by name and step.
"""


def main() -> int:
    """Record what is not recorded yet, compare, and print the differences."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.compare", description=__doc__.splitlines()[0]
    )
    parser.add_argument("base", help="commit whose results are expected")
    parser.add_argument(
        "head", nargs="?", help="commit to compare with it; the working tree where it is left out"
    )
    parser.add_argument("--only", nargs="+", help="variants to run, of tests/golden/variants.yaml")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (default: %(default)s)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=ROOT / ".golden",
        help="folder of records by commit (default: %(default)s)",
    )
    arguments = parser.parse_args()
    base = record_commit(arguments.base, arguments.cache, arguments.only, arguments.jobs)
    head = record_commit(arguments.head, arguments.cache, arguments.only, arguments.jobs)
    names = sorted(set(base) | set(head)) if arguments.only is None else arguments.only
    differing = [name for name in names if not report_variant(name, base.get(name), head.get(name))]
    print(
        f"{len(names) - len(differing)} of {len(names)} variants have equal results"
        + (f"; not equal: {', '.join(differing)}" if differing else "")
    )
    return 1 if differing and not os.environ.get("RESULTS_CHANGED") else 0


def record_commit(commit: str | None, cache: Path, only: list[str] | None, jobs: int) -> dict[str, Digest]:
    """The digests of a commit's runs by variant.

    Those of a commit are cached; those of the working tree are not.
    """
    with tempfile.TemporaryDirectory(prefix="fed-rlhf-golden-") as scratch:
        checkout = Path(scratch) / "checkout"
        if commit is None:
            copy_working_tree(checkout)
            record: Path | None = None
        else:
            full = git("rev-parse", f"{commit}^{{commit}}")
            record = cache / f"{full}.json"
            git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(checkout))
            git("-C", str(checkout), "checkout", "--quiet", full)
        known: dict[str, Digest] = (
            json.loads(record.read_text(encoding="utf-8")) if record is not None and record.is_file() else {}
        )
        source = checkout / VARIANTS if (checkout / VARIANTS).is_file() else ROOT / VARIANTS
        variants: dict[str, list[str]] = {
            name: overrides
            for name, overrides in yaml.safe_load(source.read_text(encoding="utf-8")).items()
            if not name.startswith("_")
        }
        missing = [name for name in variants if name not in known and (only is None or name in only)]
        if missing:
            with prefect_server(checkout, Path(scratch)) as environment, ThreadPoolExecutor(jobs) as pool:
                runs = pool.map(
                    lambda name: run_variant(checkout, Path(scratch) / name, variants[name], environment),
                    missing,
                )
                for name, digest in zip(missing, runs, strict=True):
                    known[name] = digest
                    print(f"{commit or 'working tree'}: {name} recorded", flush=True)
                    if record is not None:
                        record.parent.mkdir(parents=True, exist_ok=True)
                        record.write_text(json.dumps(known), encoding="utf-8")
    return known


def copy_working_tree(target: Path) -> None:
    """Copy the files that git tracks, or would track, as they are now."""
    for name in git("-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def git(*arguments: str) -> str:
    """Output of a git command in this repository."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


@contextmanager
def prefect_server(checkout: Path, scratch: Path) -> Iterator[dict[str, str]]:
    """The environment of the runs, with a Prefect server for all of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PREFECT_", "MLFLOW_", "FED_RLHF_"))
    }
    environment = inherited | {
        "PYTHONPATH": str(checkout),
        "PREFECT_HOME": str(scratch / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "FED_RLHF_BACKBONES": os.environ.get("FED_RLHF_BACKBONES", str(ROOT / "data" / "backbone")),
    }
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-ui",
    ]
    server = subprocess.Popen(
        command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}/api"
    try:
        wait_for(f"{url}/health", server)
        yield environment | {"PREFECT_API_URL": url}
    finally:
        server.terminate()
        server.wait(30)


def wait_for(url: str, server: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.25)
    raise RuntimeError(f"the Prefect server at {url} did not start within {seconds:.0f} s")


def run_variant(checkout: Path, folder: Path, overrides: list[str], environment: dict[str, str]) -> Digest:
    """Run the recipe `debug` with overrides, and digest what it wrote.

    Raises:
        RuntimeError: the run failed; its output is in the message.
    """
    folder.mkdir()
    database = folder / "mlflow.db"
    places = {"FED_RLHF_RUNS": str(folder / "runs"), "MLFLOW_TRACKING_URI": f"sqlite:///{database}"}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "debug", *overrides],
        cwd=checkout,
        env=environment | places,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"debug {' '.join(overrides)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    (run,) = (path.parent for path in (folder / "runs").glob("*/recipe.yaml"))
    digest = digest_run(run, database)
    shutil.rmtree(folder)
    return digest


def digest_run(run: Path, database: Path) -> Digest:
    """What a run wrote, by content; names of files and tensors may change between commits."""
    files = {"server": run / "federation", "clients": run / "federation-clients", "policy": run / "alignment"}
    digest: Digest = {
        name: sorted({hash_tensors(path) for path in folder.rglob("*.safetensors")})
        for name, folder in files.items()
    }
    return digest | {"metrics": read_report(run / "report" / "metrics.json") | read_metrics(database)}


def read_report(path: Path) -> dict[str, list[Any]]:
    """The numbers of a report by name; none of a commit whose report is a tree, which MLflow has too."""
    numbers = json.loads(path.read_text(encoding="utf-8"))
    flat = all(isinstance(value, int | float) for value in numbers.values())
    return {key: [[0, value]] for key, value in numbers.items() if flat and "seconds" not in key}


def hash_tensors(path: Path) -> str:
    """Hash of a safetensors file's tensors by types, shapes and values, and not by names."""
    from safetensors.numpy import load_file

    tensors = load_file(path).values()
    hashes = sorted(
        hashlib.sha256(f"{tensor.dtype} {tensor.shape}".encode() + tensor.tobytes()).hexdigest()
        for tensor in tensors
    )
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:24]


def read_metrics(database: Path) -> dict[str, list[Any]]:
    """Values of all metrics of all MLflow runs, as [step, value] pairs by name, timings excepted."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select key, step, value from metrics order by key, step, value").fetchall()
    metrics: dict[str, list[Any]] = {}
    for key, step, value in rows:
        if "seconds" not in key:
            metrics.setdefault(key, []).append([step, value])
    return {
        key: [pair for n, pair in enumerate(pairs) if pair not in pairs[:n]] for key, pairs in metrics.items()
    }


def report_variant(name: str, base: Digest | None, head: Digest | None) -> bool:
    """Print how the results of a variant differ; whether what both commits keep is equal."""
    if base is None:
        print(f"{name}: new at HEAD")
        return True
    if head is None:
        print(f"{name}: not compared, since HEAD does not have this variant")
        return True
    differences = []
    incomparable = []
    for part in ("server", "clients", "policy"):
        before, after = set(base[part]), set(head[part])
        if not (before <= after or after <= before):
            differences.append(
                f"adapters of {part}: {len(before)} at BASE, {len(after)} at HEAD,"
                f" {len(before & after)} equal"
            )
        elif before != after:
            kept_by = "HEAD" if before < after else "BASE"
            incomparable.append(f"{len(before ^ after)} adapters of {part} that only {kept_by} keeps")
    expected = {renamed(key): values for key, values in base["metrics"].items()}
    metrics = head["metrics"]
    shared = sorted(set(expected) & set(metrics))
    differences += [
        f"metric {key}: {expected[key]} at BASE, {metrics[key]} at HEAD"
        for key in shared
        if expected[key] != metrics[key]
    ]
    print(
        f"{name}: {'differs' if differences else 'equal'} ({len(base['server'])} server and"
        f" {len(base['clients'])} client adapters, {len(shared)} metrics;"
        f" {len(set(metrics) - set(expected))} metrics added)"
    )
    missing = sorted(set(expected) - set(metrics))
    if missing:
        incomparable.append(f"metrics that HEAD does not have: {', '.join(missing)}")
    for line in incomparable:
        print(f"    not compared: {line}")
    for line in differences[:12]:
        print(f"    {line}")
    return not differences


def renamed(key: str) -> str:
    """A metric's name at HEAD."""
    for old, new in RENAMED_METRICS:
        key = re.sub(old, new, key)
    return key


if __name__ == "__main__":
    raise SystemExit(main())
