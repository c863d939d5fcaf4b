"""Reports of runs and benchmarks: figures, tables, plots and HTML, as functions of results."""
