"""Post-processors of updates: they change what a client sends, and what the server combines.

Clipping, noise and masks are post-processors. They are applied in their order at the client, to the
whole update (tensors, losses, numbers and metrics), and in reverse order to each combination at the
server. Tensors that count something (COUNT), such as steps, are sent and combined as they are. The
settings of post-processors are part of a job's key, so that a repeated job never returns an update
that was made without them. A post-processor may keep a state at the server, which is committed. The
package itself has none yet; installed packages add some through the entry points of the group
`fed_rlhf.postprocessors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pydantic import JsonValue

from components.config.section import KindSection
from components.federation.protocol import COUNT, ClientResult

if TYPE_CHECKING:
    from components.config import FederationConfig
    from components.models.store import Adapter


@dataclass(frozen=True)
class Context:
    """Where a post-processor acts: at a client, or on a combination at the server."""

    round: int
    kind: str  # of the client's job (train, measure, ...), or the phase of the server's step
    adapter_name: str  # name of the server's adapter that it is about; empty for several
    participants: tuple[str, ...]  # the clients of the step, or those whose updates are combined
    weight: float  # share of all training pairs of the client, or of these clients; 0 between steps
    client: str = ""  # empty at the server
    # For choices that a repeated job has to repeat; noise and masks come from the system's entropy.
    seed: int = 0
    # Where the tensors start from, under the same names: the adapter that the client received, or that
    # the server had before; zeros of gradients and of other tensors that are no adapter. Empty without.
    origin: Adapter = field(default_factory=dict)


class Processed(NamedTuple):
    """What a post-processor makes of a combination."""

    tensors: Adapter
    state: JsonValue = None  # for its next call, whatever adapter that is about
    metrics: Mapping[str, float] = MappingProxyType({})


class PostProcessor(KindSection):
    """A post-processor, as the section of a recipe that describes it."""

    def at_client(self, result: ClientResult, context: Context) -> ClientResult:
        """What the client sends; its metrics may have more numbers.

        Jobs that measure or generate have no tensors, and an output (JSON). Neither is added or dropped.
        """
        return result

    def at_server(self, combined: Adapter, context: Context, state: JsonValue) -> Processed:
        """What the server goes on with; `state` is that of the last call, None before the first one."""
        return Processed(combined, state)


def origin_of(tensors: Adapter, adapter: Adapter) -> Adapter:
    """Where tensors start from: those of an adapter by their names, and zeros for the others."""
    return {name: adapter.get(name, tensor.new_zeros(tensor.shape)) for name, tensor in tensors.items()}


def split_counts(tensors: Adapter) -> tuple[Adapter, Adapter]:
    """The tensors that move, which post-processors see, and those that count something."""
    counts = {name: tensor for name, tensor in tensors.items() if name.startswith(COUNT)}
    return {name: tensor for name, tensor in tensors.items() if name not in counts}, counts


def processing_key(config: FederationConfig) -> str:
    """What a client does with its rows and its update, as a part of a job's key; empty for nothing."""
    privacy = [] if config.privacy is None else [config.privacy]
    return "|".join(section.model_dump_json() for section in (*config.postprocessors, *privacy))
