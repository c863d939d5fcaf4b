"""Settings of libraries for the whole process: telemetry, progress bars, logs, threads and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from components.config import UserError
from components.io import FullDiskError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
VARIABLES = {
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
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with the password of the address
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",  # half a minute; the default is four minutes a call
    "TQDM_DISABLE": "1",
    "GIT_PYTHON_REFRESH": "quiet",
    "RAY_USAGE_STATS_ENABLED": "0",
    CUBLAS: ":4096:8",  # cuBLAS reads it when it starts; see use_deterministic_kernels
}
"""Environment variables of libraries."""

SPIN = {"GOMP_SPINCOUNT": "3000"}
"""How often a thread of a CPU operation looks whether the others are ready, before it sleeps.

libgomp's default, spinning for seconds, is much slower where another program, such as the run's own
Prefect server, uses a core; to sleep at once is slower where none does. So short a spin costs nothing
beside another program and has most of the gain without one; docs/results shows the measurement. A
result does not depend on it.
"""
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables by which a user chooses how threads wait."""

MALLOC = {
    "MALLOC_MMAP_MAX_": (-4, 0),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),
    "MALLOC_TOP_PAD_": (-2, 2**28),
    "MALLOC_ARENA_MAX": (-8, 1),
}
"""Settings of glibc's malloc: variable, its number for mallopt(3) (malloc.h), and value.

By these settings the memory of a freed tensor serves the next one. By default, every tensor above
32 MB is mapped anew, and a step touches each of its pages for the first time. Memory beyond 2 GB at
the end of the heap is returned to the system, and all of it by release_memory.
"""

PRIVATE_PREFECT = "FED_RLHF_PRIVATE_PREFECT"
"""Environment variable that is set while the Prefect API ends with this process."""

QUIET_LOGGERS = {
    "great_expectations": logging.WARNING,
    "alembic": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,  # it logs with a stack trace what it raises
    "mlflow.tracking._model_registry": logging.WARNING,
    "absl": logging.WARNING,
    "bitsandbytes": logging.ERROR,  # it warns at each product that it computes in float16
}


USER_ERROR = "user_error"
"""Attribute of a log record of a UserError; flows/terminal.py leaves these to the command's sentence."""


class UserErrorFilter(logging.Filter):
    """Marks a log record of a UserError, and removes its stack trace, since the message explains it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the record."""
        if record.exc_info and isinstance(record.exc_info[1], UserError | FullDiskError):
            record.exc_info = record.exc_text = None
            setattr(record, USER_ERROR, True)
        return True


USER_ERROR_FILTER = UserErrorFilter()


def configure_libraries() -> None:
    """Set what the user has not set. Call it before the first heavy import of a process."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in WAIT_VARIABLES):
        os.environ.update(SPIN)
    configure_malloc()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # The logged model has a signature instead of an example.
    warnings.filterwarnings("ignore", message=".*An input example was not provided.*")
    # alpaca_eval imports pkg_resources.
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated as an API")
    # PEFT sets the option itself for the Conv1D layers of GPT-2.
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False but the target module is")
    for name, level in QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(USER_ERROR_FILTER)


def malloc_variables() -> dict[str, str]:
    """MALLOC for the environment of a new process.

    Empty where the user has set variables or tunables of malloc.
    """
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    if configured or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return {}
    return {name: str(value) for name, (_, value) in MALLOC.items()}


def configure_malloc() -> None:
    """Apply MALLOC to this process, before it starts threads with arenas of their own.

    Nothing is changed where the user has configured malloc, or where the C library is not glibc.
    """
    mallopt = _glibc_function("mallopt")
    if mallopt is not None:
        for name, value in malloc_variables().items():
            mallopt(MALLOC[name][0], int(value))


def cublas_variables() -> dict[str, str]:
    """The setting of cuBLAS for the environment of a new process: the user's, or that of VARIABLES."""
    return {CUBLAS: os.environ.get(CUBLAS, VARIABLES[CUBLAS])}


def use_deterministic_kernels(device: str) -> None:
    """Compute on CUDA by kernels whose results are the same bytes each time; nothing changes on the CPU.

    The setting is torch's for the process: an operation without such a kernel raises, the backward passes
    of flash and memory-efficient attention take an order of their sums, and attention by cuDNN is not used.
    Nothing here reads memory before it is written, so new tensors are not filled, which would take time.
    """
    if device.startswith("cuda"):
        import torch

        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # untyped


def available_cores() -> int:
    """Cores that this process may use: those of its affinity, or fewer where control groups have a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, cpu_quota())))


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> float:
    """The cores that the control groups of this process allow, as those of a container; inf without a limit.

    Args:
        root: where control groups are mounted, of version 2 or 1.
        process: the groups of the process.
    """
    quotas = [math.inf]
    try:
        lines = process.read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 1 has a mount for one or several controllers, such as cpu,cpuacct, and links only sometimes.
        mounts = [one for one in root.glob("*") if "cpu" in one.name.split(",")] if controllers else [root]
        for mount in mounts:
            place = mount / group.lstrip("/")
            for folder in (place, *place.parents):  # a container sees its own group at the mount
                if folder.is_relative_to(mount):
                    quotas.append(_quota(folder))
    return min(quotas)


def _quota(folder: Path) -> float:
    """The quota of a control group in cores; inf without one."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


def release_memory() -> None:
    """Return memory that is not used: of malloc to the system, of torch's allocator to the GPUs.

    Call it between models, not between steps.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = _glibc_function("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc_function(name: str) -> Callable[..., int] | None:
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):
            return None
        function: Callable[..., int] = getattr(library, name)
        return function
    except (OSError, TypeError, AttributeError):  # e.g. TypeError on Windows
        return None


def disable_transformers_progress_bars() -> None:
    """Switch off transformers' progress bars, which no environment variable does."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # has no annotations


@contextlib.contextmanager
def preserve_root_log_level() -> Iterator[None]:
    """Restore the level of the root logger afterwards.

    The import of alpaca_eval sets it to INFO.
    """
    level = logging.getLogger().level
    try:
        yield
    finally:
        logging.getLogger().setLevel(level)


def set_torch_threads(threads: int) -> None:
    """Set the threads of a CPU operation of this process; the last bits of a result depend on them."""
    import torch

    torch.set_num_threads(max(1, threads))
