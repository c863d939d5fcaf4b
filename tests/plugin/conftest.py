"""The example is a package of its own, whose tests run once it is installed."""

collect_ignore = ["example"]
