"""What docs/screenshots.py shows of a terminal's log."""

import pytest

from docs.screenshots import middle_of_rounds, screen

LOG = (
    "Script started on a day\n"
    "\x1b[?25lprepare: 80 pairs\r\n"
    "\x1b[1mfederate\x1b[0m  round 1 of 3, about 9 s left\r\x1b[2K"
    "federate  round 2 of 3, about 6 s left\r\x1b[2Kfederate  round 3 of 3\r\x1b[2K"
    "federate: 3 rounds\r\n"
)


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (LOG, "prepare: 80 pairs\nfederate: 3 rounds"),
        (LOG[: middle_of_rounds(LOG)], "prepare: 80 pairs\nfederate  round 2 of 3, about 6 s left"),
        ("no terminal\nat all", "no terminal\nat all"),
    ],
)
def test_the_last_text_of_each_line_is_shown(log, shown):
    assert screen(log) == shown
