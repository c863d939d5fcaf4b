"""The files of tutorials."""

import re
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"


def write_titled_files(page: str, folder: Path) -> None:
    """Write the code blocks of a tutorial that have titles to files of these names."""
    text = (TUTORIALS / f"{page}.md").read_text(encoding="utf-8")
    for title, content in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL):
        (folder / title).write_text(content)
