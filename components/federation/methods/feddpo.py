"""FedDPO: clients train the policy by DPO, and the server averages (FedBiscuit section 7.1).

The method is that of Ye et al. 2024 (OpenFedLLM). The reference of eq. 2 is theta_0, the frozen
backbone, in all rounds. With the objective `ppo` it is the baseline of FedPDPO section 5, which
trains by PPO on the clients' own pairs.

The server half is that of AveragingMethod (components/federation/method.py). At the client,
components/federation/clients/policy_trainer.py trains the adapter by PreferenceLoss
(components/learning/preference.py) in the loop of components/learning/loop.py.
"""

from __future__ import annotations

from typing import ClassVar

from components.federation.pair_training import AveragedPairTraining


class FedDpo(AveragedPairTraining):
    """Options of FedDPO."""

    sums_protect_clients: ClassVar[bool] = True
