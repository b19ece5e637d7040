"""Markup in which everything is escaped unless it is `Html`."""

import html
from collections.abc import Iterable


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]

_WITHOUT_CONTENT = frozenset({"input", "meta", "link"})


def escape(text: object) -> Html:
    """Text as markup. Lone surrogates, which cannot be encoded, are replaced."""
    return Html(html.escape(str(text).encode(errors="replace").decode(), quote=True))


def join(children: Child, between: str = "") -> Html:
    """Markup of text, markup and None (nothing), also nested."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str | int | float):
        return escape(children)
    return Html(between.join(join(child) for child in children))


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """An element. `class_` is class, `data_step` data-step; True is an attribute without value, None and False none."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _WITHOUT_CONTENT:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], *, numbers: bool = True, label: str = "") -> Html:
    """A table that scrolls by itself on a narrow screen. All columns but the first hold `numbers`."""
    lines = [
        tag("tr", [tag("th", cells[0], scope="row"), *(tag("td", cell) for cell in cells[1:])])
        for row in rows
        if (cells := list(row))
    ]
    inner = tag(
        "table",
        tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head])),
        tag("tbody", lines),
        class_="numbers" if numbers else None,
    )
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=label or "table")


def definitions(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Names with values; those without a value are left out."""
    return tag(
        "dl",
        [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value not in (None, "")],
        class_="facts",
    )


def section(identifier: str, title: str, *children: Child, hidden_if_empty: bool = True) -> Html:
    """A section of a page; nothing if it has no content."""
    content = join(children)
    if hidden_if_empty and not content:
        return Html("")
    return tag("section", tag("h2", title), content, id=identifier, data_live=True, aria_label=title, class_="card")


def bar(parts: Iterable[tuple[str, float]], *, total: float, label: str, limit: float | None = None) -> Html:
    """A horizontal stacked bar of shares of `total`, with a line at `limit`. Colours are those of the classes part-1,
    part-2 and so on."""
    drawn, left = [], 0.0
    for index, (name, amount) in enumerate(parts, 1):
        width = max(0.0, min(amount / total if total else 0.0, 1.0 - left))
        drawn.append(
            tag(
                "rect",
                x=f"{100 * left:.3f}%",
                y="0",
                width=f"{100 * width:.3f}%",
                height="100%",
                class_=f"part-{(index - 1) % 8 + 1}",
                data_part=name,
            )
        )
        left += width
    if limit is not None and limit < total:
        drawn.append(tag("rect", x=f"{100 * limit / total:.3f}%", y="0", width="3", height="100%", class_="limit"))
    return tag("svg", drawn, class_="bar", role="img", aria_label=label)


def legend(parts: Iterable[tuple[str, Child]]) -> Html:
    """The names and amounts of a bar's parts, in its order."""
    items = [
        tag("li", tag("span", class_=f"swatch part-{(index - 1) % 8 + 1}"), tag("span", name), tag("b", amount))
        for index, (name, amount) in enumerate(parts, 1)
    ]
    return tag("ul", items, class_="legend")
