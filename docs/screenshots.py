"""Screenshots of the pages that people use, for docs/guides/pages.md, by a headless Chromium.

    script -qefc 'stty cols 110; fed-rlhf run summarization/demo' demo.log
    fed-rlhf benchmark PLAN
    python docs/screenshots.py RUN BENCHMARK demo.log

RUN is the id of the run of demo.log, BENCHMARK a finished benchmark's folder. The servers of
`make mlflow-ui` and `make prefect-ui` are started, and ended.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.paths import PACKAGE, prefect_address
from infra.servers import is_up
from tasks.runs import find_benchmark, find_run
from tasks.tracking.report import run_url

FOLDER = PACKAGE / "docs" / "images" / "pages"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SERVERS = {
    "mlflow-server": "http://127.0.0.1:5000/health",
    "prefect-server": f"{prefect_address()}/api/health",
}
SECONDS = 30
"""That a page may take to load its data."""
ERASED = re.compile(r"(?:\x1b\[\?25h|\r)*\x1b\[1A\x1b\[2K")
"""Beginning of a line that erases the one above it."""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
TERMINAL_COLUMNS = 150
TERMINAL_STYLE = (
    "background:#14181f;color:#e6e9ef;font:14px/1.35 monospace;padding:14px;margin:0;white-space:pre-wrap"
)


def main() -> int:
    """Take all screenshots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="id or folder of a finished run")
    parser.add_argument("benchmark", help="id or folder of a finished benchmark")
    parser.add_argument("log", type=Path, help="what the terminal showed of the run, written by script(1)")
    arguments = parser.parse_args()
    run = find_run(arguments.run)
    metadata = run.metadata()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        log = arguments.log.read_bytes().decode("utf-8", errors="replace")  # newlines as they are
        for name, part in (("terminal", log[: middle_of_rounds(log)]), ("terminal-end", log)):
            page, text = Path(scratch) / f"{name}.html", screen(part)
            shown = f"<pre style='{TERMINAL_STYLE}'>{html.escape(text)}</pre>"
            body = f'<meta charset="utf-8"><body style="background:#14181f;margin:0">{shown}'
            page.write_text(body, encoding="utf-8")
            height = 150 + 19 * sum(1 + len(line) // TERMINAL_COLUMNS for line in text.split("\n"))
            take(page.as_uri(), name, 40 + round(8.43 * TERMINAL_COLUMNS), height)
    take((run.report / "report.html").as_uri(), "report", 1200, 1900)
    benchmark = find_benchmark(arguments.benchmark) / "report" / "report.html"
    take(benchmark.as_uri(), "benchmark", 1200, 1500)
    with servers():
        mlflow = run_url(metadata["mlflow_run_id"])
        take(mlflow, "mlflow", 1400, 1000)
        take(mlflow.replace("?", "/model-metrics?"), "mlflow-metrics", 1400, 1300)
        flow_run = metadata["flow_run_url"].split("/", 3)[-1]
        take(f"{prefect_address()}/{flow_run}", "prefect", 1400, 1000)
    return 0


def middle_of_rounds(log: str) -> int:
    """Where the terminal shows a round in the middle."""
    rounds = [match.end() for match in re.finditer(r"round \d+ of \d+[^\r\n]*left", log)]
    return rounds[len(rounds) // 2] if rounds else len(log)


def screen(log: str) -> str:
    """The text that a terminal shows in the end: each line after its last return to its beginning."""
    lines: list[str] = []
    for line in log.replace("\r\n", "\n").split("\n"):
        if ERASED.match(line):
            lines.pop()
        lines.append(ESCAPE.sub("", line.rpartition("\r")[2]))
    kept = [line for line in lines if not line.startswith(("Script started", "Script done"))]
    return "\n".join(kept).strip("\n")


def take(url: str, name: str, width: int, height: int) -> None:
    """Write docs/images/pages/<name>.png of a page."""
    chromium = next((found for one in CHROMIUM if (found := shutil.which(one))), None)
    if chromium is None:
        raise SystemExit("there is no Chromium: install one, e.g. with apt-get install chromium")
    path = FOLDER / f"{name}.png"
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--hide-scrollbars", f"--user-data-dir={profile}", f"--window-size={width},{height}"),
                *(f"--timeout={1000 * SECONDS}", f"--virtual-time-budget={1000 * SECONDS}"),
                *(f"--screenshot={path}", url),
            ],
            check=True,
            capture_output=True,
            timeout=4 * SECONDS,
        )
    print(path.relative_to(PACKAGE))


@contextmanager
def servers() -> Iterator[None]:
    """The servers of both user interfaces, until the block ends."""
    processes = [subprocess.Popen([sys.executable, "-m", "infra.servers", name]) for name in SERVERS]
    try:
        for url in SERVERS.values():
            while not is_up(url):
                time.sleep(1)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
