"""Everything that starts servers."""
