"""Names of clients, domains, adapters and the like, where not every character can stand.

There is one encoding for each kind of place, and an encoding gives different names different results.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

MAX_FILE_NAME = 60
"""Characters of a name that are read in the name of its file."""
PLAIN = re.compile(rf"[a-z0-9_][a-z0-9_-]{{0,{MAX_FILE_NAME - 1}}}")
"""Names that files may have everywhere: on file systems that ignore case, or compose accents, too."""
DEVICES = re.compile(r"con|prn|aux|nul|com[0-9]|lpt[0-9]")
"""Names of devices on Windows."""
DIGEST_END = re.compile(r"-[0-9a-f]{16}$")
MAX_MLFLOW_NAME = 250
"""Bytes of the name of a metric, a parameter or a model; MLflow allows as many characters."""
MAX_LABEL = 60
"""Characters of a name in a chart."""
PLOTLY = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;"})
"""What plotly reads as tags, formulas and fields; it decodes these entities, but not those of quotes."""


def file_name(name: str) -> str:
    """The name of a file or folder: the name itself if it is plain, else what is readable and a hash."""
    is_plain = PLAIN.fullmatch(name) and not DEVICES.fullmatch(name) and not DIGEST_END.search(name)
    if is_plain:
        return name
    readable = re.sub(r"^-|[^A-Za-z0-9_-]", "_", name[:MAX_FILE_NAME])
    return f"{readable}-{_digest(name)}"


def mlflow_key(path: str) -> str:
    """The name of a metric or a parameter: letters and digits of any script and `_ . : -` stay, in parts.

    Other characters are _uHEX_, their code points, and an empty part is _u_.
    """
    parts = [_encoded(part, r". :\-") for part in path.split("/")]
    named = [part.replace(".", "_u2e_") if part in (".", "..") else part or "_u_" for part in parts]
    return _shortened("/".join(named), path)


def mlflow_model(name: str) -> str:
    """The name of a logged model, which search filters may quote; see mlflow_key."""
    return _shortened(_encoded(name, r" \-"), name)


def plotly_text(text: str) -> str:
    """A text that plotly shows as it is."""
    return text.translate(PLOTLY)


def markdown_text(text: str) -> str:
    """A text that markdown shows as it is, in a paragraph or in the cell of a table."""
    escaped = re.sub(r"[\\`*$|]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", escaped)


def short_labels(names: Iterable[str], limit: int = MAX_LABEL) -> dict[str, str]:
    """By name, a label of at most `limit` characters; names that begin equally get numbers."""
    labels = {name: name for name in names}
    taken = {name for name in labels if len(name) <= limit}
    for name in labels:
        count, ending = 1, "…"
        while len(labels[name]) > limit or (len(name) > limit and labels[name] in taken):
            labels[name] = name[: limit - len(ending)] + ending
            count, ending = count + 1, f"… ({count + 1})"
        taken.add(labels[name])
    return labels


def _encoded(text: str, allowed: str) -> str:
    """A text in which characters that are not allowed are code points, and what looks like one is too."""
    return re.sub(rf"_(?=u[0-9a-fh_])|[^\w{allowed}]", lambda match: f"_u{ord(match[0]):x}_", text)


def _shortened(encoded: str, name: str) -> str:
    """An encoded name; one that is too long ends with a hash of the name, after the mark _uh_."""
    if len(encoded.encode()) <= MAX_MLFLOW_NAME:
        return encoded
    ending = f"_uh_{_digest(name)}"
    return encoded.encode()[: MAX_MLFLOW_NAME - len(ending)].decode(errors="ignore") + ending


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]
