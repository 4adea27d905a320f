"""``piper.visualize``: a timeline as a file, by the file's extension."""

from pathlib import Path

from piper.boundary import public
from piper.errors import PictureError, expect, nearest
from piper.simulate.timeline import Timeline
from piper.visualize.files import cannot_write
from piper.visualize.html import write_html
from piper.visualize.svg import write_svg
from piper.visualize.trace import save_trace

KINDS = {
    ".html": "a page to look around in",
    ".svg": "a static picture of the chunks",
    ".json": "a trace for Perfetto",
}
"""What there is to draw, by extension."""


@public
def visualize(
    timeline: Timeline,
    path: str | Path,
    *,
    compare: Timeline | None = None,
    names: tuple[str, str] = ("", ""),
    title: str = "",
) -> tuple[Path, ...]:
    """Draw *timeline* into the file *path*; the files that were written.

    ``.html`` makes a page that needs no network: zoom, search, what waits for what, memory;
    *compare* is drawn below, and differences are listed. *names* say what the two timelines are. A
    timeline too large for one page makes several, ``x.html``, ``x-2.html``, … ``.svg`` makes a
    static picture of the chunks, ``.json`` a trace for https://ui.perfetto.dev. Times are in the
    timeline's own unit: seconds, or forwards (F = 1).

    Raises :class:`~piper.errors.PictureError` for another extension, a timeline without boxes, two
    timelines in different units, or a file that cannot be written.
    """
    for each in (timeline,) if compare is None else (timeline, compare):
        expect(each, Timeline, "visualize", "piper.simulate and trainer.profile make them")
    where = Path(path)
    check_kind(where)
    if compare is not None and where.suffix != ".html":
        raise PictureError(f"{where}: two timelines are compared on an .html page only")
    if compare is not None and compare.unit != timeline.unit:
        raise PictureError(
            f"expected two timelines in one unit of time to compare, found {timeline.unit!r} and {compare.unit!r}; simulate both with "
            "the same kind of costs"
        )
    match where.suffix:
        case ".html":
            timelines = (timeline,) if compare is None else (timeline, compare)
            shown = tuple(name or f"step {i + 1}" for i, name in enumerate(names))
            return write_html(
                timelines,
                shown[: len(timelines)] if compare or names[0] else ("one step",),
                where,
                title=title or where.stem,
            )
        case ".svg":
            write_svg(timeline, where)
        case _:
            try:
                where.parent.mkdir(parents=True, exist_ok=True)
                save_trace(timeline, where)
            except OSError as error:
                raise cannot_write(where, error) from error
    return (where,)


def check_kind(path: Path) -> None:
    """Raise :class:`PictureError` unless *path* ends like a picture that can be drawn."""
    if path.suffix not in KINDS:
        kinds = ", ".join(f"{suffix} ({what})" for suffix, what in KINDS.items())
        raise PictureError(
            f"{path}: expected a file name that ends in {kinds}{nearest(path.suffix, KINDS)}"
        )
