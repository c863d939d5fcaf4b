"""Aggregators of the clients' adapters, one file per family, registered in AGGREGATORS."""
