"""A page in a real browser, as a person sees and uses it."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@contextmanager
def chromium():
    """A headless Chromium; skips the test, with the reason, where there is none."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'"
    )
    with api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            found = playwright.chromium.executable_path
            if not Path(found).exists():
                pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is on the PATH")
        # As root, as in a container, Chromium cannot make its sandbox.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Opened:
    """One page, and all that it complained about or asked the network for."""

    def __init__(self, page, file):
        self.page = page
        self.complaints = []
        self.requests = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(file.as_uri())
        self.settle()

    def settle(self):
        """Wait until movements are over and everything is drawn."""
        self.page.evaluate(
            """async () => {
              const {view} = piperPage;
              for (let still = 0, t0, t1; still < 3;) {
                await new Promise(requestAnimationFrame);
                still = t0 === view.t0 && t1 === view.t1 ? still + 1 : 0;
                ({t0, t1} = view);
              }
            }"""
        )

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def place(self, label, device, chart=0):
        """The middle of a box, in pixels of the window."""
        return self.page.evaluate(
            """([label, device, number]) => {
              const chart = piperPage.charts[number], t = chart.timeline;
              const i = [...Array(t.n).keys()].find((k) => t.text(k) === label && t.device(k).device === device);
              const row = chart.rowOfLane[t.laneOf[i]], {left, top} = chart.canvas.getBoundingClientRect();
              return [left + chart.x((t.start[i] + t.end[i]) / 2), top + row.y - chart.scroll + row.height / 2];
            }""",
            [label, device, chart],
        )

    def click(self, label, device, chart=0):
        self.page.mouse.click(*self.place(label, device, chart))
        self.settle()

    def colour(self, label, device, chart=0):
        """What colour the box is drawn in: that of a pixel left of its text, as red, green,
        blue.
        """
        x, y = self.place(label, device, chart)
        return self.pixel(x, y - 7, chart)

    def pixel(self, x, y, chart=0):
        """The colour of a chart at a point of the window."""
        return self.page.evaluate(
            """([x, y, number]) => {
              const {canvas, ratio} = piperPage.charts[number], {left, top} = canvas.getBoundingClientRect();
              const c = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
              c.drawImage(canvas, -Math.round((x - left) * ratio), -Math.round((y - top) * ratio));
              return [...c.getImageData(0, 0, 1, 1).data.slice(0, 3)];
            }""",
            [x, y, chart],
        )

    def text(self, selector):
        return self.page.inner_text(selector)

    def shown(self):
        """The times between which the charts show the step, in seconds."""
        return self.page.evaluate("[piperPage.view.t0, piperPage.view.t1]")
