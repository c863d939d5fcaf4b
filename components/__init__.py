"""Plain Python: algorithms and data of federated preference alignment; no Prefect, no MLflow, no global state."""
