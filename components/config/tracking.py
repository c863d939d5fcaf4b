"""Names of a run in the tracking store."""

from __future__ import annotations

from pydantic import Field

from components.config.section import Section


class TrackingConfig(Section):
    """MLflow's names for a run and for its policy."""

    experiment: str = Field("fed-rlhf", min_length=1)
    """MLflow experiment."""
    registered_model: str | None = Field("fed-rlhf-policy", pattern=r"^[^/:]+$")
    """Name under which the aligned policy is registered; null: it is not. Arms of a benchmark have null
    where the benchmark sets nothing."""
