import torch

from components.federation.aggregators.aggregator import Contributions
from components.federation.protocol import TrainJob, Update
from components.models.store import AdapterStore
from fed_support.aggregator import ServerStep


def test_the_server_moves_half_of_the_way_to_the_mean(tmp_path):
    store = AdapterStore(tmp_path)
    server = {"w": torch.tensor([0.0, 2.0, 4.0])}
    start = store.put(server)
    updates = []
    for client, values in {"a": [2.0, 2.0, 2.0], "b": [4.0, 4.0, 4.0]}.items():
        job = TrainJob(client=client, round=0, seed=0, adapter=start)
        adapter = store.put({"w": torch.tensor(values)})
        updates.append(Update(job=job.key(), client=client, adapter=adapter, rows=1))
    contributions = Contributions(store, updates, weights=[0.5, 0.5], clients=2)

    moved, _ = ServerStep(lr=0.5).combine(server, contributions)

    assert moved["w"].tolist() == [1.5, 2.5, 3.5]
