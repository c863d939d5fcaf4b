"""Tasks that log to MLflow; none of them knows a method by name.

One parent run per flow run, one child per phase; the step of a metric is the round. MLflow's active
run is thread-local, so everything here names its run. Logging a step twice writes the same values,
so a resumed run may log again what a killed one logged.
"""
