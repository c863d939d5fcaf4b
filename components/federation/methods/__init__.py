"""The server half of each federated method: one file per method, registered in METHODS."""
