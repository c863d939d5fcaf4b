"""What every library is told before it is imported, in one place: no telemetry, no progress bars, no chatter, no spinning threads."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

from components.config import Explained

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "TQDM_DISABLE": "1",
    "GIT_PYTHON_REFRESH": "quiet",
    "RAY_USAGE_STATS_ENABLED": "0",
}

THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads of a CPU operation sleep while they wait for each other. Spinning, the default, is a little faster on an idle
machine; where another program wants a core too (this run's own Prefect server does), a step of the demo's selector took
7.8 s spinning and 0.9 s sleeping."""


class WithoutTraces(logging.Filter):
    """Takes the stack trace off a log record whose error is explained by its message."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], Explained):
            record.exc_info = record.exc_text = None
        return True


TRACES = WithoutTraces()


def quiet() -> None:
    """Set what the person has not set already. Call it before the first heavy import of a process."""
    for name, value in (QUIET | THREADS).items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*An input example was not provided.*")  # the signature is given instead
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated as an API")  # alpaca_eval imports it
    for name in ("great_expectations", "alembic", "mlflow.store.db.utils", "mlflow.tracking._model_registry", "absl", "matplotlib.font_manager"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns at each product that it computes in float16
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(TRACES)


def quiet_transformers() -> None:
    """The part of transformers' chatter that only its own functions switch off."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def root_level_kept() -> Iterator[None]:
    """Import alpaca_eval inside: it sets the level of everybody's logs to INFO."""
    level = logging.getLogger().level
    try:
        yield
    finally:
        logging.getLogger().setLevel(level)
