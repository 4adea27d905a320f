import msgspec
import pytest
from tests.visualize.browser import Opened, chromium
from tests.visualize.timelines import pipeline

import piper
from piper.ids import COMPUTE, NodeId, Stream
from piper.schedules import one_f_one_b
from piper.simulate.timeline import (
    Box,
    DeviceTimeline,
    Lane,
    MemoryCurve,
    Source,
    Timeline,
)
from piper.visualize.colours import LOOKS
from piper.visualize.html import write_html


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def step():
    return pipeline(one_f_one_b(3, 6), stages=3, replicas=2)


@pytest.fixture(scope="module")
def files(step, tmp_path_factory):
    """The pages that the tests look at."""
    folder = tmp_path_factory.mktemp("pages")
    measured = pipeline(one_f_one_b(3, 6), stages=3, replicas=2, scale=1.25, source=Source.MEASURED)
    (one,) = piper.visualize(step, folder / "one.html", title="A step")
    (two,) = piper.visualize(
        step, folder / "two.html", compare=measured, names=("foretold", "found")
    )
    parts = write_html([step], ["x"], folder / "parts.html", title="x", most_boxes=100)
    return {"one": one, "two": two, "parts": parts}


@pytest.fixture
def open_page(browser):
    """Opens a page; when the test is over, it must not have complained, nor asked for anything but
    itself.
    """
    opened = []

    def go(file, scheme="light", width=1300, height=900):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        opened.append((context, Opened(context.new_page(), file)))
        return opened[-1][1]

    yield go
    for context, page in opened:
        context.close()
        assert page.complaints == []
        assert all(url.startswith("file:") for url in page.requests)


def rgb(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def close(a, b, by=3):
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) <= by


def test_boxes_are_drawn_in_the_colours_of_their_passes(open_page, files, step):
    page = open_page(files["one"])
    assert page.page.title() == "A step"
    assert close(page.colour("F PP=0 MB=0", 0), rgb(LOOKS["F"].colour))
    assert close(page.colour("B PP=1 MB=2", 2), rgb(LOOKS["B"].colour))
    rows = page.text("#devices").splitlines()
    assert len(rows) == 1 + len(step.devices)
    assert f"{1e3 * step.seconds:.1f} ms" in page.text("#totals")
    assert f"{100 * step.bubble:.1f} %" in page.text("#totals")
    assert "forward" in page.text("#legend")
    assert "activations" in page.text("#legend")


def test_the_theme_is_the_systems_until_it_is_switched(open_page, files):
    def brightness(page):
        box = page.page.locator(".rows canvas").bounding_box()
        return page.pixel(box["x"] + 3, box["y"] + 3)

    assert min(brightness(open_page(files["one"], "light"))) > 240
    page = open_page(files["one"], "dark")
    assert max(brightness(page)) < 50
    page.press("t")
    assert min(brightness(page)) > 240
    page.page.click("#theme")
    page.settle()
    assert max(brightness(page)) < 50


def test_a_click_shows_what_a_box_waits_for_and_what_waits_for_it(open_page, files):
    page = open_page(files["one"])
    related, unrelated = ("F PP=1 MB=0", 2), ("F PP=0 MB=2", 1)
    before = page.colour(*related), page.colour(*unrelated)
    page.click("F PP=1 MB=1", 2)
    panel = page.text("#selected")
    assert panel.startswith("F PP=1 MB=1")
    for fact in ("2.00 ms", "#", "PP=1", "forward", "64.0 MiB", "2, compute"):
        assert fact in panel
    waits, followers = panel.split("Waits for it")
    assert "F PP=1 MB=0" in waits.split("Waits for")[1]
    followers = " ".join(followers.split())
    assert followers.startswith("F transfer PP=1 MB=1 binding device 2")
    assert "B PP=1 MB=0 device 2" in followers  # next on the stream
    assert "B PP=1 MB=1 device 2" in followers  # reads what it saved
    assert close(page.colour(*related), before[0])
    assert not close(page.colour(*unrelated), before[1], by=60)
    page.page.click("#selected .waits button >> nth=0")
    assert page.text("#selected").startswith("F PP=1 MB=0")
    # What let a box start is marked; what had to end too comes behind.
    page.click("B PP=0 MB=0", 0)
    waits = page.text("#selected").split("Waits for it")[0].split("Waits for")[1]
    assert " ".join(waits.split()) == (
        "B transfer PP=1 MB=0 binding device 0 F PP=0 MB=2 device 0 F PP=0 MB=0 device 0"
    )
    page.press("Escape")
    assert page.text("#selected").startswith("Click a box")
    assert close(page.colour(*unrelated), before[1])


def test_the_mouse_shows_facts(open_page, files):
    page = open_page(files["one"])
    assert page.page.is_hidden("#tooltip")
    page.page.mouse.move(*page.place("B PP=0 MB=1", 0))
    tip = page.text("#tooltip")
    assert tip.startswith("B PP=0 MB=1")
    for fact in ("4.00 ms", "backward", "waits for", "B transfer PP=1 MB=1"):
        assert fact in tip
    x, _ = page.place("F PP=0 MB=0", 0)
    memory = page.page.evaluate(
        "(() => { const c = piperPage.charts[0]; return c.rows.find((r) => r.memory).y + c.canvas.getBoundingClientRect().top })()"
    )
    page.page.mouse.move(x + 200, memory + 5)
    tip = page.text("#tooltip")
    assert tip.startswith("memory of device 0")
    assert "optimizer\n128 MiB" in tip
    page.page.mouse.move(x, 20)
    assert page.page.is_hidden("#tooltip")


def test_zoom_and_pan(open_page, files, step):
    page = open_page(files["one"])
    whole = page.shown()
    assert whole[0] == 0
    assert whole[1] == pytest.approx(step.seconds, rel=0.02)
    page.press("+", "+")
    near = page.shown()
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 4)
    page.press("a")
    assert page.shown()[0] < near[0]
    page.press("0")
    assert page.shown() == pytest.approx(whole)
    x, y = page.place("B PP=0 MB=2", 0)
    page.page.mouse.move(x, y)
    page.page.keyboard.down("Control")
    page.page.mouse.wheel(0, -600)
    page.page.keyboard.up("Control")
    page.settle()
    assert page.shown()[1] - page.shown()[0] < 0.5 * (whole[1] - whole[0])
    assert page.place("B PP=0 MB=2", 0) == pytest.approx((x, y), abs=2)  # under the mouse as before
    page.page.mouse.down()
    page.page.mouse.move(x + 120, y, steps=3)
    page.page.mouse.up()
    assert page.place("B PP=0 MB=2", 0) == pytest.approx((x + 120, y), abs=2)
    page.page.dblclick("#fit")
    page.settle()
    assert page.shown() == pytest.approx(whole)
    page.page.mouse.move(400, page.page.locator(".rows").bounding_box()["y"] + 10)
    page.page.mouse.down()
    page.page.mouse.move(700, 200, steps=3)
    page.page.mouse.up()
    page.settle()
    assert page.shown()[1] - page.shown()[0] < 0.5 * (whole[1] - whole[0])
    box = page.page.locator(".overview").bounding_box()
    page.page.mouse.click(box["x"] + box["width"] - 5, box["y"] + 10)
    page.settle()
    assert page.shown()[1] == pytest.approx(whole[1])


def test_the_keyboard_reaches_every_box(open_page, files):
    page = open_page(files["one"])
    page.press("ArrowRight")
    assert page.text("#selected").startswith("F PP=0 MB=0")
    page.press("ArrowRight")
    assert page.text("#selected").startswith("F PP=0 MB=1")
    page.press("]")
    followed = page.text("#selected").splitlines()[0]
    assert followed in {"F PP=0 MB=2", "F transfer PP=0 MB=1"}
    page.press("[")
    assert page.text("#selected").startswith("F PP=0 MB=1")
    assert page.text("#spoken").startswith("F PP=0 MB=1, duration 2.00 ms")
    page.press("Enter")  # from 2 to 4 ms, with four times as much on both sides
    assert page.shown() == pytest.approx([0, 18e-3])
    page.press("0", "ArrowDown")
    assert page.text("#selected").startswith("B transfer PP=1 MB=0")  # the first on that stream
    for _ in range(40):
        page.page.keyboard.press("ArrowDown")
    page.settle()
    assert page.page.evaluate("piperPage.charts[0].scroll") > 0
    assert "device\n5, " in page.text("#selected")
    page.press("?")
    assert page.page.is_visible("#help")
    page.press("Escape")
    assert page.page.is_hidden("#help")


def test_search(open_page, files):
    page = open_page(files["one"])
    before = page.colour("B PP=1 MB=2", 3)
    page.press("/")
    page.page.keyboard.type("pp=1 compute @2")
    page.settle()
    assert page.text("#matches") == "13 found"
    assert not close(page.colour("B PP=1 MB=2", 3), before, by=60)
    assert close(page.colour("B PP=1 MB=2", 2), before)
    page.press("Enter")
    assert page.text("#matches") == "1 of 13"
    assert page.text("#selected").startswith("F PP=1 MB=0")
    page.press("Shift+Enter")
    assert page.text("#matches") == "13 of 13"
    page.page.fill("#search", "mb=99")
    assert page.text("#matches") == "0 found"
    page.press("Escape")
    assert page.text("#matches") == ""
    assert close(page.colour("B PP=1 MB=2", 3), before)


def test_the_critical_path_stands_out(open_page, files, step):
    page = open_page(files["one"])
    on = {
        (b.label, d.device)
        for d in step.devices
        for b in d.boxes()
        if b.critical and b.op == "compute"
    }
    off = {
        (b.label, d.device)
        for d in step.devices
        for b in d.boxes()
        if not b.critical and b.op == "compute"
    }
    on, off = min(on), min(off)
    before = page.colour(*on), page.colour(*off)
    page.press("c")
    assert page.page.get_attribute("#critical", "aria-pressed") == "true"
    assert close(page.colour(*on), before[0])
    assert not close(page.colour(*off), before[1], by=60)
    page.page.click("#critical")
    page.settle()
    assert close(page.colour(*off), before[1])
    rows = page.text("#improve").splitlines()
    assert rows[0].startswith("B")
    assert rows[0].endswith("%")


def test_rows_can_be_left_out(open_page, files):
    page = open_page(files["one"])
    height = "piperPage.charts[0].height"
    heights = [page.page.evaluate(height)]
    for key in ("o", "m"):
        page.press(key)
        heights.append(page.page.evaluate(height))
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 3
    assert "receive.act" not in page.page.evaluate(
        "piperPage.charts[0].rows.map((r) => r.lane?.stream)"
    )


def test_two_timelines_are_compared(open_page, files):
    page = open_page(files["two"])
    assert page.page.locator(".chart").count() == 2
    assert "+25.0 %" in page.text("#totals")
    page.click("F PP=0 MB=1", 0)
    panel = page.text("#selected")
    assert "In found" in panel
    assert "2.50 ms (+25.0 %)" in panel
    page.click("F PP=0 MB=2", 0, chart=1)
    panel = page.text("#selected")
    assert "In foretold" in panel
    assert "2.00 ms (−20.0 %)" in panel
    # Both move together, and what is selected is singled out in both.
    assert not close(page.colour("F PP=0 MB=1", 1, chart=0), rgb(LOOKS["F"].colour), by=60)
    page.press("+")
    assert page.place("F PP=0 MB=2", 0, 1)[0] - page.place("F PP=0 MB=1", 0, 1)[0] == pytest.approx(
        1.25 * (page.place("F PP=0 MB=2", 0)[0] - page.place("F PP=0 MB=1", 0)[0]), rel=0.01
    )
    page.press("0", "l")
    assert page.page.get_attribute("#equal", "aria-pressed") == "true"
    for box in (("F PP=0 MB=0", 0), ("B PP=1 MB=5", 2)):
        assert page.place(*box, 0)[0] == pytest.approx(page.place(*box, 1)[0], abs=0.01)
        assert close(page.colour(*box, 1), page.colour(*box, 0))
    page.press("+")
    x, y = page.place("B PP=0 MB=2", 0, 1)
    page.page.mouse.move(x, y)
    assert page.text("#tooltip").startswith("B PP=0 MB=2")
    page.page.mouse.down()
    page.page.mouse.move(x + 50, y, steps=3)
    page.page.mouse.up()
    assert page.place("B PP=0 MB=2", 0, 1)[0] == pytest.approx(x + 50, abs=2)


def test_parts_say_so_and_lead_to_each_other(open_page, files):
    page = open_page(files["parts"][0])
    count = len(files["parts"])
    assert page.text("#parts").startswith(f"Too large for one page: part 1 of {count}.")
    first = page.shown()
    page.page.click("#parts a >> nth=0")
    page.page.wait_for_url("**/parts-2.html")
    page.settle()
    assert f"part 2 of {count}" in page.text("#parts")
    assert page.shown()[0] == pytest.approx(first[1], rel=0.02)


def large(num_devices, per_device):
    """Forwards and backwards in turn, each of which waits for the one before; memory changes with
    each.
    """
    length, devices = 1e-3, []
    for d in range(num_devices):
        boxes = tuple(
            Box(
                position=i,
                node=NodeId(i),
                op="compute",
                label=f"{'FB'[i % 2]} PP={d} MB={i // 2}",
                pass_="FB"[i % 2],
                tags=(("PP", d), ("MB", i // 2)),
                microbatch=i // 2,
                start=(i + 0.05 * (i % 3)) * length,
                end=(i + 0.9) * length,
                waits_on=(NodeId(i - 1),) if i else (),
                critical=i % num_devices == d,
            )
            for i in range(per_device)
        )
        lanes = (Lane(Stream(COMPUTE), boxes),)
        memory = MemoryCurve(
            tuple(b.end for b in boxes),
            {
                "parameters": (20,) * per_device,
                "activations": tuple(i * 7919 % 31 for i in range(per_device)),
            },
        )
        devices.append(DeviceTimeline(d, (d,), lanes, memory, 1.0, 0.1, 0.0, peak=50))
    seconds = per_device * length
    return Timeline(
        1, Source.SIMULATED, seconds, num_devices, ("MB",), 0.0, None, tuple(devices), ()
    )


def test_a_hundred_thousand_boxes_are_drawn_in_the_time_of_a_frame(open_page, tmp_path):
    (file,) = piper.visualize(large(15, 6667), tmp_path / "large.html")
    page = open_page(file, width=2560, height=1440)
    assert page.page.evaluate("piperPage.timelines[0].n") == 100_005
    # All of them are in sight.
    assert page.page.evaluate("piperPage.charts[0].height <= piperPage.charts[0].shown")
    for kind in ("pan", "zoom"):
        script, frames = page.page.evaluate(
            """async (kind) => {
              const {view} = piperPage, script = [], frames = [];
              const frame = () => new Promise(requestAnimationFrame);
              view.show(view.from, view.latest);
              if (kind === "pan") view.show(...view.zoomed(1.2, view.latest / 3));
              await frame();
              let last = await frame();
              for (let i = 0; i < 32; i++) {
                if (kind === "pan") view.move(view.length / 200);
                else view.show(...view.zoomed(i < 16 ? 1.2 : 1 / 1.2, view.latest / 3));
                const now = await frame();
                script.push(piperPage.frameMilliseconds);
                frames.push(now - last);
                last = now;
              }
              return [script, frames].map((list) => list.sort((a, b) => a - b));
            }""",
            kind,
        )
        # 60 frames per second leave 16.7 ms, a part of it for what the browser does itself; other
        # processes may hold up any one frame.
        assert script[len(script) // 2] < 16.7
        assert frames[len(frames) // 4] < 20
    page.press("0")
    page.click("F PP=1 MB=700", 1)
    assert page.text("#selected").startswith(("F PP=1 MB=", "B PP=1 MB="))


def test_what_is_too_narrow_for_a_box_is_drawn_by_its_share_of_time(open_page, tmp_path):
    step = large(1, 3000)
    (lane,) = step.devices[0].lanes
    boxes = tuple(
        msgspec.structs.replace(b, end=b.start + 1e-3 / 2) for b in lane.boxes if b.pass_ == "F"
    )
    device = msgspec.structs.replace(
        step.devices[0], lanes=(msgspec.structs.replace(lane, boxes=boxes),)
    )
    (file,) = piper.visualize(
        msgspec.structs.replace(step, devices=(device,)), tmp_path / "narrow.html"
    )
    page = open_page(file)
    found = page.page.evaluate(
        """(() => {
          const chart = piperPage.charts[0], row = chart.rows.find((r) => r.lane);
          const c = new OffscreenCanvas(400, 1).getContext("2d");
          c.drawImage(chart.canvas, -200 * chart.ratio, -(row.y + 5) * chart.ratio);
          const {data} = c.getImageData(0, 0, 400, 1), sums = [0, 0, 0];
          data.forEach((v, i) => { if (i % 4 < 3) sums[i % 4] += v / 400; });
          return sums;
        })()"""
    )
    # One box of half a millisecond every two: a quarter of the colour on white, but at least the
    # visible share.
    colour = rgb(LOOKS["F"].colour)
    quarter = [255 - (255 - v) / 4 for v in colour]
    third = [255 - (255 - v) * 0.36 for v in colour]
    assert all(t - 4 <= v <= q + 4 for v, q, t in zip(found, quarter, third, strict=True))


def test_texts_of_the_user_are_texts(open_page, tmp_path):
    evil = "<img src=x onerror=alert(1)> \u202e 注意 " + "long " * 40
    step = pipeline(one_f_one_b(2, 2), stages=2)
    first = step.devices[0]
    boxes = tuple(
        msgspec.structs.replace(b, label=evil, op=evil, tags=((evil, 1),))
        for b in first.lanes[0].boxes
    )
    lanes = (msgspec.structs.replace(first.lanes[0], boxes=boxes, stream=evil), *first.lanes[1:])
    memory = MemoryCurve((0.0,), {evil: (5,)})
    device = msgspec.structs.replace(first, lanes=lanes, memory=memory)
    step = msgspec.structs.replace(step, devices=(device, *step.devices[1:]))
    (file,) = piper.visualize(
        step, tmp_path / "x.html", compare=step, names=(evil, evil), title=evil
    )
    page = open_page(file)
    page.press("ArrowRight", "c")
    page.page.mouse.move(
        *page.page.evaluate(
            "(() => { const c = piperPage.charts[0]; const {left, top} = c.canvas.getBoundingClientRect(); return [left + c.x(1e-3), top + c.rows[0].y + 5]; })()"
        )
    )
    assert page.text("#selected").startswith(evil[:20])
    assert page.page.locator("img").count() == 0


@pytest.mark.parametrize("width", [400, 1300])
def test_nothing_sticks_out_of_the_window(open_page, files, width):
    page = open_page(files["two"], width=width, height=800)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.page.evaluate(
        """[...document.querySelectorAll("button, input, canvas, table, .caption b")]
          .map((e) => [e.id || e.className || e.textContent, e.getBoundingClientRect(), e.scrollHeight - e.clientHeight])
          .filter(([, box, hidden]) => box.right > innerWidth + 0.5 || (hidden > 4))
          .map(([name]) => name)"""
    )
    assert wide == []
    x, y = page.place("B PP=0 MB=5", 0)
    page.page.mouse.move(x, y)
    box = page.page.locator("#tooltip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= 800


def test_paper_shows_all_rows_dark_on_light(open_page, files):
    page = open_page(files["one"], "dark", height=500)
    shown = "piperPage.charts[0].shown >= piperPage.charts[0].height - 1"
    assert not page.page.evaluate(shown)
    page.page.emulate_media(media="print")
    page.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.page.evaluate(shown)
    x, y = page.page.evaluate(
        "(() => { const {left, top} = piperPage.charts[0].canvas.getBoundingClientRect(); return [left + 3, top + 3]; })()"
    )
    assert min(page.pixel(x, y)) > 240
    page.page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.page.emulate_media(media="screen")
    page.settle()
    assert not page.page.evaluate(shown)
    assert page.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_box_that_takes_no_time_is_seen(open_page, tmp_path):
    step = large(1, 3)
    (lane,) = step.devices[0].lanes
    middle = msgspec.structs.replace(lane.boxes[1], end=lane.boxes[1].start)
    lane = msgspec.structs.replace(lane, boxes=(lane.boxes[0], middle, lane.boxes[2]))
    device = msgspec.structs.replace(step.devices[0], lanes=(lane,), memory=MemoryCurve())
    step = msgspec.structs.replace(step, devices=(device,))
    (file,) = piper.visualize(step, tmp_path / "x.html")
    page = open_page(file)
    x, y = page.place("B PP=0 MB=0", 0)
    assert min(min(page.pixel(x + dx, y)) for dx in (-1, 0, 1)) < 240
    page.page.mouse.click(x, y)
    assert page.text("#selected").startswith("B PP=0 MB=0")


def test_a_step_counted_in_forwards_names_its_unit_once(open_page, step, tmp_path):
    forwards = msgspec.structs.replace(step, unit="F")
    (file,) = piper.visualize(forwards, tmp_path / "forwards.html")
    caption = open_page(file).page.locator(".caption").inner_text()
    assert " F · bubble" in caption
    assert "F F" not in caption
