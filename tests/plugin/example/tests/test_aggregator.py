import torch

from fed_rlhf import Sum
from fed_support.aggregator import ServerStep


def test_the_server_moves_half_of_the_way_to_the_mean():
    server = {"w": torch.tensor([0.0, 2.0, 4.0])}
    # Of a client with [2, 2, 2] and one with [4, 4, 4], each with a quarter of all pairs.
    total = Sum({"w": torch.tensor([1.5, 1.5, 1.5])}, weight=0.5, clients=("a", "b"), asked=2)

    moved, _ = ServerStep(lr=0.5).finish(server, total)

    assert moved["w"].tolist() == [1.5, 2.5, 3.5]
