"""Devices, threads and the task runner, and what the tracking store and the reports of a run have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from components.config.section import Section


class RuntimeConfig(Section):
    """How the work is distributed.

    Nothing here changes a result on one type of device, except torch_threads and cpu_workers in the last
    bits; several GPUs on threads, where rewards use no TF32 in rounds; and several GPUs of Ray, where
    completions are sampled in other batches, and can differ where two tokens are equal up to rounding.
    What a run chooses when it starts is stored with its recipe (tasks/devices.py), so that it resumes with
    the same values.
    """

    transport: str = "prefect"
    """Where clients' jobs run. prefect: in mapped tasks of the run, on the task runner; processes: in a
    separate process and folder for each client, on this machine and without Ray, which receives only this
    client's rows. Installed packages may register others."""
    task_runner: Literal["threads", "ray"] | None = None
    """Where mapped tasks run. threads: threads of this process, one per GPU or cpu_workers on the
    CPU; ray: processes of Ray, one per GPU or as many as there are cores for. null: ray with a
    ray_address, and where a run starts with several GPUs and the extra ray is installed; else threads."""
    ray_address: str | None = None
    """Address HOST:PORT of a Ray cluster; null starts a local one."""
    devices: list[str] | None = None
    """Devices to use, e.g. ['cuda:0', 'cuda:1'] or ['cpu']; null uses all CUDA devices, or else the
    CPU."""
    cpu_workers: int | None = Field(None, ge=1, le=256)
    """Clients that train concurrently on the CPU, each with a model of its own in memory and an
    even share of the threads. As threads their models must have no dropout, since a process has one
    generator for all; on Ray as many run as its machines have cores for, with the same share. null: 2
    where a run starts on the CPU with at least two threads, without dropout and with several tasks per
    round, else 1."""
    torch_threads: int | None = Field(None, ge=1, le=4096)
    """Threads of a CPU operation, or of all concurrent clients together. Sums are split by it, so
    runs that shall be equal to the last bit need the same value. null: the cores that the process
    may use where the run starts, limited by a container's CPU quota, rounded up."""
    check_memory: bool = True
    """Refuse a run of which a stage needs more memory, by the estimate, than a GPU here has. The estimate has
    all rows at their full length, so data with shorter rows may fit where it says that they do not."""
    data_docs: bool = True
    """Write the outcome of the expectations as Great Expectations' Data Docs (HTML) too, beside the
    prepared data and to MLflow."""
    sockets: str | None = Field(None, min_length=1)
    """Folder of the sockets of owners, with data.source 'owners'. null: sockets/ of the project's home."""
    retries: int = Field(1, ge=0, le=100)
    """Retries of a failed task before its clients are left out of the round."""
    client_timeout: float | None = Field(None, gt=0, le=1e7, allow_inf_nan=False)
    """Maximum seconds for a client's job, excluding model loading. It requires transport 'processes': the
    process of a job that takes longer is killed, the job is retried, and after `retries` attempts the client
    is left out of the round. null: no limit."""

    @property
    def workers(self) -> int:
        """Clients that train concurrently on the CPU."""
        return self.cpu_workers or 1

    @property
    def shares_process(self) -> bool:
        """Whether clients that train concurrently on the CPU are threads of one process."""
        return self.task_runner != "ray" and self.transport != "processes"

    @property
    def threads_of_client(self) -> int | None:
        """Threads of a client's operations on the CPU; None where nothing was chosen yet."""
        return None if self.torch_threads is None else max(1, self.torch_threads // self.workers)

    @model_validator(mode="before")
    @classmethod
    def _without_compile(cls, values: Any) -> Any:
        """Recipes of earlier runs store false for the option compile, which was removed."""
        if isinstance(values, Mapping) and values.get("compile") is False:
            return {key: value for key, value in values.items() if key != "compile"}
        return values

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.transport == "processes" and (self.task_runner == "ray" or self.ray_address is not None):
            raise ValueError(
                "transport 'processes' starts the owners' processes on this machine: leave out task_runner"
                " and ray_address, or use transport 'prefect'"
            )
        return self

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        if self.ray_address is not None and self.devices:
            raise ValueError(
                "devices are those of this machine: a Ray cluster has the GPUs that its nodes were started"
                " with, so leave devices or ray_address out"
            )
        if self.task_runner == "threads" and self.ray_address is not None:
            raise ValueError("ray_address is for task_runner 'ray': set task_runner too, or leave it out")
        return self

    @field_validator("ray_address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is not None and not re.fullmatch(r"[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", address):
            raise ValueError(f"'{address}' is no address of a cluster: expected HOST:PORT, as 10.0.0.1:6379")
        return address

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: list[str] | None) -> list[str] | None:
        if devices is None:
            return None
        for device in devices:
            if not re.fullmatch(r"cpu|cuda:\d+", device):
                raise ValueError(f"'{device}' is not a device: use 'cpu' or 'cuda:0', 'cuda:1', ...")
        if not devices or len(set(devices)) < len(devices):
            raise ValueError(
                "name at least one device, and each only once: a device serves one client at a time"
            )
        return devices


class TrackingConfig(Section):
    """MLflow's names for a run and for its policy, and figures of single clients."""

    experiment: str = Field("fed-rlhf", min_length=1)
    """MLflow experiment."""
    registered_model: str | None = Field("fed-rlhf-policy", pattern=r"^[^/:]+$")
    """Name under which the aligned policy is registered; null: it is not. Arms of a benchmark have null
    where the benchmark sets nothing."""
    client_figures: bool = True
    """Whether a step that needs only sums of the clients' updates records what each client did (its losses,
    sizes and times); false: the number of clients, sums and means. Steps that need single updates record each
    client in any case."""
