"""docs/llms.txt lists the pages of the site with their first sentences, in the layout of llmstxt.org."""

import re
import sys

import pytest
import yaml

from components.paths import PACKAGE
from docs import generate_reference
from docs.generate_reference import DOCS, first_sentence, llms_text, main

ENTRY = re.compile(r"- \[[^\]]+\]\(([\w/-]+)\.html\): (\S.*)")


@pytest.fixture(scope="module")
def text():
    return llms_text({})


def test_it_has_a_title_a_summary_and_sections_of_links(text):
    blocks = text.rstrip("\n").split("\n\n")
    assert blocks[0] == "# fed-rlhf"
    assert re.fullmatch(r"> [A-Z][^\n]+\.", blocks[1])
    headings = [block.removeprefix("## ") for block in blocks[2::2]]
    sections = ["Overview", "Tutorials", "Guides", "Reference", "Methods", "Results", "Optional"]
    assert headings == sections
    lines = "\n".join(blocks[3::2]).splitlines()
    assert [line for line in lines if not ENTRY.fullmatch(line)] == []


def test_it_has_each_page_of_the_documentation_once(text):
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(page for page, _ in ENTRY.findall(text)) == sorted(pages)


def test_every_page_begins_with_a_sentence(text):
    ends = (".", ":")
    assert [line for _, line in ENTRY.findall(text) if not line.endswith(ends) or "](" in line] == []


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("---\nhide: [a]\n---\n\n# T\n\nOne. Two.", "One."),
        ("<!-- x -->\n\n# T\n\n![A. B](c.svg)\n\nOne [two](a.md#b),\nthree. `Four` five.", "One two, three."),
        ("# T\n\n| a |\n|---|\n\n- b\n\n`c` is\nd, by E. et al. 2024. No", "`c` is d, by E. et al. 2024."),
    ],
)
def test_the_first_sentence_is_found_after_what_is_no_paragraph(page, sentence):
    assert first_sentence(page) == sentence


def test_a_generated_page_is_listed_as_it_will_be_written():
    line = "- [New](reference/cli.html): Other words."
    assert line in llms_text({DOCS / "reference" / "cli.md": "# New\n\nOther words. More."}).splitlines()


@pytest.mark.parametrize("stored", ["", "# other\n"])
def test_the_check_names_it_where_it_is_not_current(stored, monkeypatch, capsys):
    def read(path):
        return stored if path.name == "llms.txt" else path.read_text(encoding="utf-8")

    monkeypatch.setattr(generate_reference, "read_text", read)
    monkeypatch.setattr(sys, "argv", ["generate_reference.py", "--check"])
    assert main() == 1
    assert capsys.readouterr().err == "docs: llms.txt not current: run python docs/generate_reference.py\n"


def test_it_is_part_of_the_site():
    config = yaml.safe_load((PACKAGE / "mkdocs.yml").read_text(encoding="utf-8"))
    assert "txt" not in config["exclude_docs"]
    assert (DOCS / "llms.txt").is_file()
