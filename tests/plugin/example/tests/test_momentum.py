import torch

from fed_rlhf import AdapterStore, Client, Federation, Server, StepAnswers, Sum, load_recipe
from fed_support.momentum import FedDpoMomentum


def test_a_part_of_the_last_step_is_added_to_the_next_one(tmp_path):
    store = AdapterStore(tmp_path)
    config = load_recipe("debug").federation
    clients = tuple(Client(name=name, training_pairs=4, validation_pairs=1, weight=0.5) for name in "ab")
    federation = Federation(clients=clients, initial=store.put({"w": torch.tensor([0.0])}))
    method = FedDpoMomentum(beta=0.5)
    state = method.start(federation, seed=0)
    adapters = []
    for mean in (2.0, 5.0):
        total = Sum({"w": torch.tensor([mean])}, weight=1.0, clients=("a", "b"), asked=2)
        answers = StepAnswers(clients=total.clients, sums={"policy": total})
        state = method.aggregate(state, (), Server(config, store, answers))
        adapters.append(store.get(state.adapters["policy"])["w"].item())

    # v_1 = 2 - 0 = 2, phi_1 = 2;  v_2 = 0.5 * 2 + (5 - 2) = 4, phi_2 = 6
    assert adapters == [2.0, 6.0]
