"""The contents line of each long page, made from its headings.

python tests/contents.py --write    writes it into every page that has to have one
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIRST_PAGE = ROOT / "README.md"  # has its own tables of what is where
CHANGES = ROOT / "minirl" / "CHANGES.md"  # is looked through by version
LONG = 1_000  # words
MARKER = "**On this page:**"


def pages() -> list[Path]:
    """Return the documents of the repository, in order."""
    found = [FIRST_PAGE]
    for folder in ("minirl", "configs", "benchmarks", "tests", "launch"):
        found += sorted((ROOT / folder).rglob("*.md"))
    return found


def needs_contents(page: Path) -> bool:
    """Return whether a page is long enough that readers look for its sections."""
    if page in (FIRST_PAGE, CHANGES):
        return False
    text = page.read_text()
    return len(text.split()) > LONG and len(sections(text)) > 2


def sections(text: str) -> list[str]:
    """Return the titles of the second level, in order, without those inside code blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^## (.*)$", prose, flags=re.MULTILINE)


def anchor(title: str) -> str:
    """Return what a heading is called in links, as GitHub does."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def contents(text: str) -> str:
    """Return the line of links to the sections of a page."""
    links = [f"[{title}](#{anchor(title)})" for title in sections(text)]
    return f"{MARKER} {' · '.join(links)}"


def with_contents(text: str) -> str:
    """Return a page with its contents line below the title, in place of an older one."""
    lines = [line for line in text.split("\n") if not line.startswith(MARKER)]
    title, *rest = lines
    body = "\n".join(rest).lstrip("\n")
    return f"{title}\n\n{contents(text)}\n\n{body}"


def main() -> None:
    """Write the contents line of every long page, or name the pages in which it is not right."""
    for page in pages():
        text = page.read_text()
        if needs_contents(page) and text != with_contents(text):
            print(page.relative_to(ROOT))
            if sys.argv[1:] == ["--write"]:
                page.write_text(with_contents(text))


if __name__ == "__main__":
    main()
