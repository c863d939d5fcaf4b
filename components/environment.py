"""What every library is told before it is imported, in one place: no telemetry, no progress bars, no chatter, no spinning threads."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import warnings
from collections.abc import Callable, Iterator

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


MALLOC = {"MALLOC_MMAP_MAX_": (-4, 0), "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1), "MALLOC_TOP_PAD_": (-2, 2**28), "MALLOC_ARENA_MAX": (-8, 1)}
"""Settings of glibc's malloc by which a freed tensor's memory serves the next one: variable, its number for mallopt(3) (malloc.h), and value. As they come, every
tensor above 32 MB is mapped anew and given back when it is freed, so that a step touches each of its pages for the first time: 170,000 page faults in a step of DPO
with SmolLM2-135M-Instruct and 4 pairs, and about a quarter of its time. Memory beyond 2 GB at the heap's end is given back, and all of it by give_back_memory."""


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
    keep_memory()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*An input example was not provided.*")  # the signature is given instead
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated as an API")  # alpaca_eval imports it
    for name in ("great_expectations", "alembic", "mlflow.store.db.utils", "mlflow.tracking._model_registry", "absl", "matplotlib.font_manager"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns at each product that it computes in float16
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(TRACES)


def malloc_variables() -> dict[str, str]:
    """MALLOC for the environment of a process that is to be started; empty where the person has set one of malloc's variables, or tunables of the C library."""
    return {} if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") else {name: str(value) for name, (_, value) in MALLOC.items()}


def keep_memory() -> None:
    """Set MALLOC in this process; before it has threads, since those that have an arena of their own keep it.

    Left as it is where the person has set one of malloc's variables, and where the C library is not glibc.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        for name, value in malloc_variables().items():
            mallopt(MALLOC[name][0], int(value))


def give_back_memory() -> None:
    """Return to the system what malloc holds and nobody uses; between models, not between steps."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    try:
        library = ctypes.CDLL(None)
        return getattr(library, name) if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, TypeError, AttributeError):  # e.g. TypeError on Windows
        return None


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
