import torch

from components.federation.method import Server
from components.federation.protocol import Client, Federation, Update
from components.models.store import AdapterStore
from components.recipes import load_recipe
from fed_support.momentum import FedDpoMomentum


def test_a_part_of_the_last_step_is_added_to_the_next_one(tmp_path):
    store = AdapterStore(tmp_path)
    config = load_recipe("debug").federation
    clients = tuple(Client(name=name, training_pairs=4, validation_pairs=1, weight=0.5) for name in "ab")
    federation = Federation(clients=clients, initial=store.put({"w": torch.tensor([0.0])}))
    method = FedDpoMomentum(beta=0.5)
    state = method.start(federation, seed=0)
    adapters = []
    for trained in ({"a": 1.0, "b": 3.0}, {"a": 4.0, "b": 6.0}):
        updates = []
        for client, value in trained.items():
            adapter = store.put({"w": torch.tensor([value])})
            updates.append(Update(job=f"{client}-{state.round}", client=client, adapter=adapter, rows=4))
        state = method.aggregate(state, updates, Server(config, store, updates))
        adapters.append(store.get(state.adapters["policy"])["w"].item())

    # v_1 = 2 - 0 = 2, phi_1 = 2;  v_2 = 0.5 * 2 + (5 - 2) = 4, phi_2 = 6
    assert adapters == [2.0, 6.0]
