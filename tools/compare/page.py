"""A self-contained HTML page: no network, readable from 390 pixels on, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

STYLE_SHEET = Path(__file__).with_name("page.css")
DIFF_CLASSES = (("@@", "hunk"), ("+++", "hunk"), ("---", "hunk"), ("+", "plus"), ("-", "minus"))


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """A document from (heading, HTML) pairs; empty sections are left out."""
    body = "".join(f"<section><h2>{escape(head)}</h2>{html}</section>\n" for head, html in sections if html)
    style = STYLE_SHEET.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], prose: bool = False) -> str:
    """A table that scrolls inside its own box; empty text without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="prose"' if prose else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def legend(labels: Mapping[str, str]) -> str:
    """The meaning of each class of the style sheet."""
    keys = "".join(f'<span class="key {kind}">{escape(label)}</span>' for kind, label in labels.items())
    return f"<p>{keys}</p>"


def code_diff(diff: str) -> str:
    """A unified diff with its lines coloured."""
    lines = []
    for line in diff.splitlines():
        kind = next((name for mark, name in DIFF_CLASSES if line.startswith(mark)), "")
        lines.append(f'<span class="{kind}">{escape(line) or " "}</span>')
    return f"<pre>{''.join(lines)}</pre>"
