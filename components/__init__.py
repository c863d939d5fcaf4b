"""Plain Python: algorithms and data of federated preference alignment, without Prefect and MLflow."""
