"""DRIFT: each client's own adapter, aggregated with those of similar clients (DRIFT section 4).

    for r in 0 .. R-1:
        S_r      = A clients sampled uniformly without replacement
        theta_k  = OPTIM(k, theta_k, K)   for k in S_r                     # from its own adapter, by DPO
        G        = complete graph of S_r, edges weighted by symmetric KL    # eqs. 6 to 9
        mst:       P_k = k's neighbors in the minimum spanning tree of G    # eq. 10
        sp:        P_k = the clients on one of k's shortest paths, by delta # eqs. 11 to 13
        theta_k  = sum of theta_i over k and P_k, weighted by rho_i         # eq. 14

Clients that are not sampled, or fail, keep their adapter and are no neighbor of that round. The
reference of the clients' DPO is the frozen backbone in all rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import networkx as nx
from pydantic import Field, JsonValue

from components.config import DpoObjective
from components.federation import graph
from components.federation.local import Local
from components.federation.method import Method
from components.federation.protocol import Memory, Update
from components.federation.server import Server, State


class GraphMemory(Memory):
    """The client graph of the last round."""

    # Node-link data of the complete graph, edges weighted by divergence.
    graph: dict[str, JsonValue] = Field(default_factory=dict)
    tree: list[list[str]] = Field(default_factory=list)  # edges of its minimum spanning tree
    # rho_i of the clients that each client was aggregated with, by client.
    weights: dict[str, dict[str, float]] = Field(default_factory=dict)


class Drift(Method):
    """Options of DRIFT. The server's adapters are named by client."""

    memory_type: ClassVar[type[Memory]] = GraphMemory
    diagnostics: ClassVar[tuple[str, ...]] = ("client_graph",)

    variant: Literal["mst", "sp"] = "mst"
    """mst: neighbors in the minimum spanning tree (section 4.1); sp: the clients on a shortest path
    (section 4.2)."""
    delta: float = Field(0.0, ge=0, le=1)
    """Divergence threshold of sp: the longest path with at most this share of the edges of all
    paths; 0 takes the shortest path. No path has more than 0.5 with 4 clients per round, 0.31 with
    8, 0.2 with 16. DRIFT table 5: 0 to 1."""
    divergence: Literal["softmax", "gaussian", "histogram"] = "softmax"
    """How an adapter is read as a distribution, see components/federation/graph.py."""
    objective: DpoObjective = Field(default_factory=lambda: DpoObjective(beta=0.2))
    """Local objective; DRIFT appendix A: beta 0.2."""

    @property
    def adapters_by_client(self) -> bool:
        return True

    def local(self) -> Local:
        return Local(self.objective)

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        """An adapter for each client that sent an update, by eq. 14."""
        contributions = server.contributions(state)
        divergences = graph.divergence_matrix(contributions.open(), self.divergence)
        clients = graph.client_graph(divergences, contributions.names)
        tree = graph.spanning_tree(clients)
        weights = {name: self._neighbor_weights(clients, tree, name) for name in contributions.names}
        adapters, metrics = server.mix(state, weights, state.adapters)
        metrics |= {f"{name}/members": len(members) for name, members in weights.items()}
        memory = GraphMemory(
            graph=nx.node_link_data(clients, edges="edges"),
            tree=sorted(sorted(edge) for edge in tree.edges),
            weights=weights,
        )
        return state.end_round(adapters, metrics | graph.divergence_metrics(clients, tree), memory)

    def _neighbor_weights(self, clients: nx.Graph, tree: nx.Graph, name: str) -> dict[str, float]:
        if self.variant == "mst":
            return graph.mst_weights(clients, name, tree)
        return graph.shortest_path_weights(clients, name, self.delta)
