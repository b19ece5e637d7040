"""What mkdocs.yml cannot say: the pages of a folder in the nav, and links to files that are no pages."""

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    docs = Path(config["docs_dir"])
    config["nav"] = expand_nav(config["nav"], docs)
    return config


def expand_nav(nav: list[Any], docs: Path) -> list[Any]:
    """`FOLDER/*` becomes the pages of the folder that the nav does not name; sections without pages are left out."""
    named = set(_pages(nav))
    return _expand(nav, docs, named)


def _pages(entries: list[Any]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += _pages(value) if isinstance(value, list) else [value]
    return found


def _expand(entries: list[Any], docs: Path, named: set[str]) -> list[Any]:
    expanded: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and entry.endswith("/*"):
            pages = [page.relative_to(docs).as_posix() for page in sorted((docs / entry[:-2]).glob("*.md"))]
            expanded += sorted((page for page in pages if page not in named), key=lambda page: "index.md" not in page)
        elif isinstance(entry, dict):
            ((title, value),) = entry.items()
            inside = _expand(value, docs, named) if isinstance(value, list) else value
            if inside:
                expanded.append({title: inside})
        else:
            expanded.append(entry)
    return expanded


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return without_repository_links(markdown, page.file.src_uri)


def without_repository_links(markdown: str, page: str) -> str:
    """Links that lead out of docs/ become their text and the path in the repository: the site does not hold those
    files."""

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        if re.match(r"[a-z]+:|#|/", target):
            return link[0]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
        if path.startswith("docs/"):
            return link[0]
        return text if path in text else f"{text} (`{path}`)"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replace, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(replace, markdown[end:])])
