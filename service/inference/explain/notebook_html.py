"""The picture of an explanation in a notebook: texts whose units are coloured by their effects.

Colours, scale and numbers are those of the page of explanations (`service/page/static`, in its
light style). The HTML is complete in itself: inline styles, no script, nothing from another host.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Colour = tuple[float, float, float]

# Of page.css: low, low-half, neutral, high-half, high.
_RAMP = ("#1f5fa8", "#8fbbe3", "#f4f4f4", "#f5b77a", "#c9640a")
_COLOURS: Sequence[Colour] = [
    (float(int(code[1:3], 16)), float(int(code[3:5], 16)), float(int(code[5:7], 16)))
    for code in _RAMP
]
# Factors by which small numbers are shown, and their names, as in dom.js.
_UNITS = (
    (1.0, ""),
    (1e3, "thousandths"),
    (1e6, "millionths"),
    (1e9, "billionths"),
    (1e12, "trillionths"),
)
# A number is shown in a unit in which the largest is not below this.
_LEAST_SHOWN = 0.01
# Relative luminance above which black text has the higher contrast, by WCAG.
_BLACK_TEXT = 0.179

_TEXT = "line-height:1.3;margin:4px 0 8px"
_CHIP = (
    "display:inline-block;vertical-align:top;max-width:100%;margin:1px;padding:2px 6px;"
    "border-radius:5px;border:1px solid #dde2e8"
)
_SMALL = "font-size:12px;font-variant-numeric:tabular-nums"


class Chip(NamedTuple):
    """A unit of a text in the picture.

    Attributes:
        start: Index of its first character in the text.
        end: Index after its last character.
        value: Number that colours it; None: not measured.
        numbers: All its numbers, shown while the pointer is over it.
    """

    start: int
    end: int
    value: float | None
    numbers: str


class Passage(NamedTuple):
    """A text in the picture.

    Attributes:
        title: Line above the text.
        text: The text.
        chips: Its units.
    """

    title: str
    text: str
    chips: Sequence[Chip]


def explanation_html(
    heading: str, passages: Sequence[Passage], meaning: str, least: float = 0.0
) -> str:
    """Return the picture of texts on one scale.

    Args:
        heading: Line above all texts.
        passages: The texts.
        meaning: Meaning of the number that colours a unit.
        least: Least scale: smaller numbers are rounding, and hardly coloured.
    """
    values = [abs(chip.value) for each in passages for chip in each.chips if chip.value is not None]
    scale = max([least, *values])
    return (
        f"<div><div><b>{escape(heading)}</b></div>{_legend(scale, meaning)}"
        f"{''.join(_passage(each, scale) for each in passages)}</div>"
    )


def format_number(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")


def format_signed(value: float | None) -> str:
    """Return a difference with its sign; None: it was not measured."""
    return "not measured" if value is None else ("+" if value > 0 else "") + format_number(value)


def _legend(scale: float, meaning: str) -> str:
    factor, unit = _unit(scale)
    ramp = f"linear-gradient(to right,{','.join(_RAMP)})"
    return (
        f'<div style="{_SMALL}">{escape(meaning)}: {_round(-scale, factor, scale)} '
        f'<span style="display:inline-block;width:110px;height:10px;border-radius:3px;'
        f'background:{ramp}"></span> +{_round(scale, factor, scale)} {unit}</div>'
    )


def _passage(passage: Passage, scale: float) -> str:
    parts: list[str] = []
    end = 0
    for chip in sorted(passage.chips, key=lambda chip: chip.start):
        parts += [escape(passage.text[end : chip.start]), _chip(chip, passage.text, scale)]
        end = chip.end
    parts.append(escape(passage.text[end:]))
    return (
        f'<div style="{_SMALL};font-weight:600">{escape(passage.title)}</div>'
        f'<div dir="auto" style="{_TEXT}">{"".join(parts)}</div>'
    )


def _chip(chip: Chip, text: str, scale: float) -> str:
    factor, _ = _unit(scale)
    number = "\N{EN DASH}" if chip.value is None else _round(chip.value, factor, scale)
    colour = _colour(chip.value or 0.0, scale)
    background = ",".join(str(round(channel)) for channel in colour)
    unit = escape(text[chip.start : chip.end])
    style = f"{_CHIP};background:rgb({background});color:{_readable(colour)}"
    return (
        f'<span style="{style}" title="{escape(chip.numbers)}">{unit}'
        f'<br><span dir="ltr" style="{_SMALL}">{number}</span></span>'
    )


def _unit(scale: float) -> tuple[float, str]:
    return next((unit for unit in _UNITS if scale * unit[0] >= _LEAST_SHOWN), _UNITS[0])


def _round(value: float, factor: float, scale: float) -> str:
    """Return a number in a unit, rounded to the third significant digit of the scale."""
    largest = scale * factor
    decimals = 2 - math.floor(math.log10(largest)) if largest else 2
    text = f"{value * factor:.{min(12, max(1, decimals))}f}"
    return (text.replace("-", "") if float(text) == 0 else text).replace("-", "\N{MINUS SIGN}")


def _colour(value: float, scale: float) -> Colour:
    """Return the colour of a number: cold below zero, neutral at zero, warm above."""
    position = 2 + 2 * value / scale if scale else 2.0
    start = min(3, int(position))
    first, second = _COLOURS[start], _COLOURS[start + 1]
    weight = position - start
    red, green, blue = (a + (b - a) * weight for a, b in zip(first, second, strict=True))
    return red, green, blue


def _readable(colour: Colour) -> str:
    """Return black or white, whichever has the higher contrast by WCAG's relative luminance."""
    red, green, blue = map(_linear, colour)
    return "#000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > _BLACK_TEXT else "#fff"


def _linear(channel: float) -> float:
    part = channel / 255
    return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)
