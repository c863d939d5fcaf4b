"""Federated methods: who does what in a round, and what the server makes of the answers."""
