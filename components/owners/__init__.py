"""Owners as processes: what a server and an owner send each other, and what runs at the owner."""
