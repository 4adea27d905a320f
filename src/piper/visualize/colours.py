"""Colours of chunks, by pass: from the palette of Okabe and Ito, which people with any kind of
colour vision can tell apart.
"""

from typing import NamedTuple


class Look(NamedTuple):
    """How boxes of a pass are drawn: what the pass is, and the colours for the even and the odd
    stages of a device.
    """

    meaning: str
    colour: str
    darker: str

    def of(self, *, odd: bool) -> str:
        """The colour for an even or odd stage."""
        return self.darker if odd else self.colour


LOOKS = {
    "F": Look("forward", "#0072b2", "#005787"),
    "B": Look("backward", "#009e73", "#007857"),
    "BI": Look("backward, inputs", "#56b4e9", "#4189b1"),
    "BW": Look("backward, weights", "#e69f00", "#af7900"),
    "UPDATE": Look("update", "#cc79a7", "#9b5c7f"),
    "": Look("other", "#8b95a1", "#6a717a"),
}
"""By pass. The page has the same colours (``assets/format.js``)."""


def ink(colour: str) -> str:
    """Black or white, whichever reads better on *colour* (``#rrggbb``); relative luminance as WCAG
    2 defines it, about.
    """
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#0b0f14" if luminance > 0.2 else "#ffffff"
