"""Federated methods: the jobs of a round, the clients that run them, and the server's aggregation."""
