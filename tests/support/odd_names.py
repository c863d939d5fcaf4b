"""Names of clients and the like that are hard to show and to store, all of which are accepted."""

ODD_NAMES = (
    "anna.o@example.com",
    "O'Brien",
    "$\\bad{$",
    'a/b:c%d "q"',
    "x" * 300,
    "研究者-一",
    "مستخدم",
    "..",
    "CON",
    "<b>x</b>",
    "a",
    "A",
)
SHARED_START = "x" * 299 + "y"
"""A name that begins as one of the others, beyond what a file name or a metric holds."""
