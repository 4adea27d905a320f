"""A timeline as a web page that needs nothing else: no server, no network, no other file.

The page draws on a canvas with the scripts in ``assets/``; the timeline is inside it as JSON. A
timeline with more boxes than a browser draws smoothly is written as several pages, one after the
other in time, that link to each other.
"""

import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec

from piper.simulate.timeline import Timeline
from piper.visualize.checks import check_drawable
from piper.visualize.files import write_text
from piper.visualize.page_data import PageData, links, timeline_data, windows

MOST_BOXES = 300_000
"""How many boxes one page holds."""

_SCRIPTS = tuple(
    f"{name}.js"
    for name in (
        "format",
        "dom",
        "data",
        "view",
        "raster",
        "labels",
        "plot",
        "overview",
        "relations",
        "around",
        "chart",
        "tables",
        "mouse",
        "page",
    )
)


def write_html(
    timelines: Sequence[Timeline],
    names: Sequence[str],
    path: Path,
    *,
    title: str,
    most_boxes: int = MOST_BOXES,
) -> tuple[Path, ...]:
    """Write a page of *timelines*, one above the other, under *names*; the files that were written,
    *path* first.

    All are in one unit of time. More than *most_boxes* boxes are spread over several files:
    ``x.html``, ``x-2.html``, … Raises :class:`~piper.errors.PictureError` if there is nothing to
    draw or a file cannot be written.
    """
    for timeline, name in zip(timelines, names, strict=True):
        check_drawable(timeline, f"timeline {name}")
    parts = windows(timelines, most_boxes)
    paths = [path.with_stem(f"{path.stem}-{i + 1}") if i else path for i in range(len(parts))]
    waits = [links(timeline) for timeline in timelines]
    for i, (window, where) in enumerate(zip(parts, paths, strict=True)):
        only = None if len(parts) == 1 else window
        shown = [
            timeline_data(timeline, name, mine, only)
            for timeline, name, mine in zip(timelines, names, waits, strict=True)
        ]
        data = PageData(shown, [p.name for p in paths], i, timelines[0].unit)
        write_text(where, page(data, title))
    return tuple(paths)


def page(data: PageData, title: str) -> str:
    """The text of one page."""
    text = {
        "style": _asset("page.css"),
        "script": "\n".join(map(_asset, _SCRIPTS)),
        "title": html.escape(title),
        # Within a script element "</script" and "<!--" have a meaning of their own; JSON can do
        # without "<".
        "data": msgspec.json.encode(data).decode().replace("<", "\\u003c"),
    }
    template = _asset("page.html")
    pieces = template.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("}}", 1)
        filled += [text[name], rest]
    return "".join(filled)


def _asset(name: str) -> str:
    return (files("piper.visualize") / "assets" / name).read_text(encoding="utf-8")
