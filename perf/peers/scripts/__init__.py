"""Programs of the peers. They run in an environment of their own, and import nothing of the project."""
