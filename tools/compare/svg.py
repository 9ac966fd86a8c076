"""Line charts as inline SVG: no script, no network, colours from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 34
POINTS_MAX = 400  # per line: more than a screen shows
TICKS = 5
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One curve; `kind` is its class in the style sheet."""

    kind: str
    points: Points


@dataclass(frozen=True)
class Frame:
    """The plotted ranges and where they lie in the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x_at(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y_at(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def chart(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """A figure with its caption that shows every point; empty text when no line has two."""
    drawn = [line for line in lines if len(line.points) > 1]
    if not drawn:
        return ""
    frame = _frame(drawn)
    clip = "clip-" + "".join(character for character in title.lower() if character.isalnum())
    box = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
    curves = "".join(
        f'<polyline class="{line.kind}" clip-path="url(#{clip})" points="{_path(line.points, frame)}"/>'
        for line in drawn
    )
    return (
        f"<figure><figcaption><b>{escape(title)}</b> ({escape(y_label)})</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<clipPath id="{clip}"><rect {box}/></clipPath>{_axes(frame, x_label)}{curves}</svg></figure>'
    )


def _frame(lines: Sequence[Line]) -> Frame:
    x_low, x_high = _limits([x for line in lines for x, _ in line.points])
    y_low, y_high = _limits([y for line in lines for _, y in line.points], pad=0.05)
    return Frame(x_low, x_high, y_low, y_high)


def _axes(frame: Frame, x_label: str) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in ticks(frame.y_low, frame.y_high):
        y = f"{frame.y_at(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(_text(LEFT - 5, frame.y_at(value) + 3.5, "end", short(value)))
    parts += [
        _text(frame.x_at(value), bottom + 15, "middle", short(value))
        for value in ticks(frame.x_low, frame.x_high)
    ]
    parts.append(_text((LEFT + right) / 2, HEIGHT - 4, "middle", x_label))
    return "".join(parts)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(points: Points, frame: Frame) -> str:
    return " ".join(f"{frame.x_at(x):.1f},{frame.y_at(y):.1f}" for x, y in thin(points) if math.isfinite(y))


def thin(points: Points) -> list[tuple[float, float]]:
    """At most POINTS_MAX points and the last one, evenly taken."""
    stride = math.ceil(len(points) / POINTS_MAX)
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _limits(values: Sequence[float], pad: float = 0.0) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if low == high:
        return low - 0.5, high + 0.5
    return low - pad * (high - low), high + pad * (high - low)


def ticks(low: float, high: float) -> list[float]:
    """About TICKS round values inside [low, high]."""
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    round_steps = [multiple * power for multiple in (1, 2, 2.5, 5, 10)]
    step = min(step for step in round_steps if step >= raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis: 1200000 as 1.2M, 12000 as 12k."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.5g}"
