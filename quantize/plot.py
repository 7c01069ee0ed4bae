"""The matrices of a report as an SVG: a cell for each, coloured by its error, outlined by its format."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from plankiln.quantize.report import MatrixRow, layers_and_kinds

_CELL, _LEFT, _TOP = 22, 130, 60
_OUTLINES = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")


def svg(rows: Sequence[MatrixRow], title: str) -> str:
    """Columns are layers, lines are kinds of matrix; those outside layers come last, below. Hovering tells the rest."""
    layers, kinds = layers_and_kinds(rows)
    others = [row for row in rows if row.layer is None]
    formats = list(dict.fromkeys(row.format for row in rows))
    worst = max((row.error for row in rows), default=0.0)
    lines = [*kinds, *(row.kind for row in others)]
    width = _LEFT + max(_CELL * len(layers), 420) + 20
    height = _TOP + _CELL * len(lines) + 40 + 20 * len(formats)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for place, layer in enumerate(layers):
        parts.append(_text(_LEFT + _CELL * place + _CELL // 2, _TOP - 6, str(layer), "middle"))
    for place, name in enumerate(lines):
        parts.append(_text(_LEFT - 6, _TOP + _CELL * place + 15, name, "end"))
    for row in rows:
        column = 0 if row.layer is None else layers.index(row.layer)
        line = len(kinds) + others.index(row) if row.layer is None else kinds.index(row.kind)
        outline = _OUTLINES[formats.index(row.format) % len(_OUTLINES)]
        told = f"{row.name}: {row.format}, {row.bytes} bytes, error {row.error:.2%}"
        parts.append(
            f'<rect x="{_LEFT + _CELL * column + 2}" y="{_TOP + _CELL * line + 2}" width="{_CELL - 4}" '
            f'height="{_CELL - 4}" fill="{_shade(row.error, worst)}" stroke="{outline}" stroke-width="2">'
            f"<title>{escape(told)}</title></rect>"
        )
    below = _TOP + _CELL * len(lines) + 24
    parts.append(_text(8, below, f"fill: relative error of the stored weights, white 0, darkest {worst:.2%}", "start"))
    for place, name in enumerate(formats):
        y = below + 20 * (place + 1)
        outline = quoteattr(_OUTLINES[place % len(_OUTLINES)])
        parts.append(
            f'<rect x="8" y="{y - 11}" width="12" height="12" fill="white" stroke={outline} stroke-width="2"/>'
        )
        parts.append(_text(28, y, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: int, y: int, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _shade(error: float, worst: float) -> str:
    """White to dark orange."""
    share = error / worst if worst else 0.0
    red, green, blue = (round(255 - share * (255 - dark)) for dark in (190, 75, 0))
    return f"rgb({red},{green},{blue})"
