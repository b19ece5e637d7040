"""A drawing as SVG text: boxes, lines and labels in colours that follow the reader's light or dark theme."""

from dataclasses import dataclass, field
from html import escape

# By name: on a light and on a dark background. Fills carry labels in the colour `ink`, so both stay readable.
COLOURS = {
    "paper": ("#ffffff", "#1e2129"),
    "ink": ("#1f2328", "#e6e9ee"),
    "faint": ("#5b6470", "#a3acb9"),
    "line": ("#b9c0ca", "#4d5563"),
    "panel": ("#f3f5f8", "#282c36"),
    "weights": ("#9ec5f4", "#2f5f9e"),
    "optimizer": ("#cdb5f0", "#64479a"),
    "gradients": ("#f8c78d", "#95581a"),
    "activations": ("#a5dcb4", "#2c6e42"),
    "head": ("#93d9dc", "#1d6a70"),
    "communication": ("#f3b3c1", "#913d52"),
    "rest": ("#d8dce2", "#464d59"),
    "accent": ("#1b62c4", "#7db3ff"),
    "wrong": ("#c0392b", "#ff8a7a"),
}
FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"


def _style() -> str:
    light = " ".join(f"--{name}: {colours[0]};" for name, colours in COLOURS.items())
    dark = " ".join(f"--{name}: {colours[1]};" for name, colours in COLOURS.items())
    fills = " ".join(f".{name} {{ fill: var(--{name}); }}" for name in COLOURS)
    return (
        f"svg {{ {light} font-family: {FONT}; font-size: 14px; }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }} "
        f"{fills} .stroke {{ stroke: var(--line); fill: none; }} .edge {{ stroke: var(--line); }} "
        ".dashed { stroke-dasharray: 4 3; } .strong { font-weight: 600; } .small { font-size: 12px; } "
        ".code { font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; font-size: 12.5px; } "
        ".large { font-size: 17px; font-weight: 600; } "
        ".arrow { stroke: var(--faint); fill: none; stroke-width: 1.5; marker-end: url(#tip); } "
        "text { fill: var(--ink); } text.faint { fill: var(--faint); } text.wrong { fill: var(--wrong); } "
        "text.accent { fill: var(--accent); }"
    )


@dataclass
class Drawing:
    """`title` and `description` are what a screen reader says; a page repeats the description as alt text."""

    width: int
    height: int
    title: str
    description: str
    _parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str = "panel", *, more: str = "edge") -> None:
        radius = 3 if min(width, height) > 8 else 0
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.6g}" height="{height:.6g}" rx="{radius}" class="{fill} {more}"/>'
        )

    def outline(self, x: float, y: float, width: float, height: float, *, more: str = "") -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.6g}" height="{height:.6g}" rx="4" class="stroke {more}"/>'
        )

    def text(self, x: float, y: float, words: str, style: str = "", *, anchor: str = "start") -> None:
        aligned = f' text-anchor="{anchor}"' if anchor != "start" else ""
        styled = f' class="{style}"' if style else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{aligned}{styled}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, more: str = "") -> None:
        self._parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="stroke {more}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="M{path}" class="arrow"/>')

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """Colour and words, side by side."""
        for colour, words in entries:
            self.box(x, y - 11, 14, 14, colour)
            self.text(x + 20, y, words, "small")
            x += 34 + 7 * len(words)

    def svg(self) -> str:
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0L8 4L0 8z" class="faint"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" aria-labelledby="title description">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="description">{escape(self.description)}</desc>',
                f"<style>{_style()}</style>",
                f"<defs>{tip}</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="6" class="paper"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
