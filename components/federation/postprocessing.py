"""Post-processors of updates: they change what a client sends, and the server's result.

Clipping, noise and masks are post-processors. They are applied in their order at the client and in
reverse order at the server, and their settings are part of a job's key, so that a repeated job
never returns an update that was made without them. The package itself has none yet; installed
packages add some through the entry points of the group `fed_rlhf.postprocessors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from components.config import FederationConfig, PostProcessorConfig

if TYPE_CHECKING:
    from components.federation.protocol import Job
    from components.models.store import Adapter


class PostProcessor(PostProcessorConfig, ABC):
    """A post-processor, as the section of a recipe that describes it."""

    @abstractmethod
    def at_client(self, update: Adapter, received: Adapter, job: Job) -> Adapter:
        """The update that the client sends.

        Args:
            update: tensors of the client's result.
            received: the adapter that the client started from.
            job: the job.
        """

    @abstractmethod
    def at_server(self, combined: Adapter, previous: Adapter) -> Adapter:
        """The server's new adapter.

        Args:
            combined: what the aggregator has combined.
            previous: the server's adapter before the step.
        """


def process_update(
    postprocessors: Sequence[PostProcessor], update: Adapter, received: Adapter, job: Job
) -> Adapter:
    """Apply the post-processors at the client, in their order."""
    for postprocessor in postprocessors:
        update = postprocessor.at_client(update, received, job)
    return update


def process_combined(
    postprocessors: Sequence[PostProcessor], combined: Adapter, previous: Adapter
) -> Adapter:
    """Apply the post-processors at the server, in reverse order."""
    for postprocessor in reversed(postprocessors):
        combined = postprocessor.at_server(combined, previous)
    return combined


def processing_key(postprocessors: Sequence[PostProcessor]) -> str:
    """The settings of the post-processors, as a part of a job's key; empty without any."""
    return "|".join(postprocessor.model_dump_json() for postprocessor in postprocessors)


def postprocessors_of(config: FederationConfig) -> tuple[PostProcessor, ...]:
    """The post-processors of a recipe.

    Raises:
        TypeError: a package has registered something else.
    """
    postprocessors = []
    for section in config.postprocessors:
        if not isinstance(section, PostProcessor):
            raise TypeError(
                f"the post-processor '{section.kind}' does not derive from {PostProcessor.__module__}"
            )
        postprocessors.append(section)
    return tuple(postprocessors)
