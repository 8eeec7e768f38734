"""The page and what belongs to it, as files of this package."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# uPlot draws the curves: https://github.com/leeoniya/uPlot, version 1.6.32 as its package has it.
STYLES = ("vendor/uPlot.min.css", "view.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "charts.js", "trajectories.js", "view.js")
LICENSE = "vendor/LICENSE"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

# By name in the address: type and bytes.
Files = dict[str, tuple[str, bytes]]

# Nothing but what this package serves: no script of a trajectory's text, no other host.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def read(name: str) -> str:
    """Return the text of a file of the page."""
    return (HERE / name).read_text()


def files() -> Files:
    """Return all that a browser may ask for beside the data."""
    found = {}
    for name in (*STYLES, *SCRIPTS):
        found[name] = (TYPES[Path(name).suffix], read(name).encode())
    found[""] = (TYPES[".html"], page().encode())
    return found


def page() -> str:
    """Return the page that asks its server for data."""
    head = "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES)
    scripts = "\n".join(f'<script src="{name}"></script>' for name in SCRIPTS)
    return read("page.html").replace("<!--head-->", head).replace("<!--scripts-->", scripts)


def whole(data: dict[str, Any]) -> str:
    """Return one page with everything in it, which asks nobody for anything.

    Args:
        data: what the page shows. It is embedded as JSON without "<", which no text in it can end.
    """
    style = "\n".join(read(name) for name in STYLES)
    script = "\n".join(read(name) for name in SCRIPTS)
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = (
        f"<!-- This file contains uPlot.\n{read(LICENSE)}-->\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    )
    scripts = (
        f'<script type="application/json" id="data">{embedded}</script>\n<script>{script}</script>'
    )
    return read("page.html").replace("<!--head-->", head).replace("<!--scripts-->", scripts)


def _hash(text: str) -> str:
    """Return how a content security policy names a text in the page."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
