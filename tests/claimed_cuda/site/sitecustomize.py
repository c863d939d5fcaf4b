"""Python imports this module when it starts: the processes of Ray that have a GPU find claimed devices."""

import os

if "CLAIMED_DEVICES" in os.environ and "FED_RLHF_GPU" in os.environ:
    from tests.claimed_cuda.hooks import LIBRARY, load_hooks

    load_hooks(os.environ[LIBRARY])

    from tests.claimed_cuda.devices import claimed_devices

    CLAIMED = claimed_devices(int(os.environ["CLAIMED_DEVICES"]))
    CLAIMED.__enter__()  # until the process ends
