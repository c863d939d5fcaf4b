"""An aggregator, a method and a source for fed-rlhf, in a package of their own."""
