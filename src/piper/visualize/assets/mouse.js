// The mouse.

/** The mouse over one chart. */
class Mouse {
  constructor(page, chart) {
    Object.assign(this, { page, chart, drag: null });
    const { canvas, rowsElement, overview: { canvas: overview } } = chart;
    rowsElement.addEventListener("scroll", () => {
      // Two charts with the same devices show the same ones.
      for (const other of page.charts) if (other.height === chart.height) other.rowsElement.scrollTop = chart.scroll;
      page.invalidate();
    });
    rowsElement.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    canvas.addEventListener("pointerup", (event) => this.#up(event));
    canvas.addEventListener("pointercancel", () => { this.drag = null; page.range = null; });
    canvas.addEventListener("pointerleave", () => this.#leave());
    canvas.addEventListener("dblclick", (event) => this.#double(event));
    overview.addEventListener("pointerdown", (event) => this.#seize(event));
    overview.addEventListener("pointermove", (event) => this.#pull(event));
    overview.addEventListener("pointerup", () => { this.held = null; overview.classList.remove("dragging"); });
  }

  #wheel(event) {
    const { page, chart } = this, { view } = page;
    const size = event.deltaMode === 1 ? 24 : 1;
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      view.show(...view.zoomed(Math.exp(-event.deltaY * size * 0.0022), chart.time(event.offsetX) * chart.factor));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      view.move((event.deltaX || event.deltaY) * size / chart.scale * chart.factor);
    }
  }

  #down(event) {
    if (event.button !== 0) return;
    this.chart.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, y: event.offsetY, scroll: this.chart.scroll, t0: this.page.view.t0, axis: event.offsetY < AXIS, moved: false };
  }

  #move(event) {
    const { page, chart, drag } = this;
    if (drag) {
      const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
      drag.moved ||= Math.hypot(dx, dy) > 4;
      if (!drag.moved) return;
      page.tip();
      if (drag.axis) {
        page.range = [drag.x, event.offsetX].map((x) => chart.time(x) * chart.factor);
        page.invalidate();
      } else {
        chart.rowsElement.classList.add("dragging");
        chart.rowsElement.scrollTop = drag.scroll - dy;
        const t0 = drag.t0 - dx / chart.scale * chart.factor;
        page.view.show(t0, t0 + page.view.length);
      }
      return;
    }
    page.cursor = event.offsetX >= GUTTER ? chart.time(event.offsetX) * chart.factor : null;
    chart.hover = chart.hit(event.offsetX, event.offsetY);
    const memory = chart.hover < 0 ? chart.hitMemory(event.offsetX, event.offsetY) : null;
    chart.rowsElement.classList.toggle("over", chart.hover >= 0);
    const known = page.selection?.chart === chart && page.selection.box === chart.hover; // its facts are in the panel
    if (chart.hover >= 0 && !known) page.tip(event.clientX, event.clientY, ...page.boxTip(chart, chart.hover));
    else if (memory) page.tip(event.clientX, event.clientY, ...page.memoryTip(memory));
    else page.tip();
    page.invalidate();
  }

  #up(event) {
    const { page, chart, drag } = this;
    this.drag = null;
    chart.rowsElement.classList.remove("dragging");
    if (!drag) return;
    if (page.range) {
      const [a, b] = page.range.sort((p, q) => p - q);
      page.range = null;
      page.view.glide(a, b);
    } else if (!drag.moved) {
      page.select(chart, chart.hit(event.offsetX, event.offsetY));
    }
  }

  #leave() {
    this.chart.hover = null;
    this.page.cursor = null;
    this.page.tip();
    this.page.invalidate();
  }

  #double(event) {
    const box = this.chart.hit(event.offsetX, event.offsetY);
    if (box >= 0) this.page.zoomTo(this.chart, box);
  }

  /** The window in the overview is dragged by its middle or an edge; elsewhere it jumps to the mouse. */
  #seize(event) {
    const { overview } = this.chart, { view } = this.page;
    const a = overview.x(view.t0), b = overview.x(view.t1), x = event.offsetX;
    overview.canvas.setPointerCapture(event.pointerId);
    overview.canvas.classList.add("dragging");
    if (Math.abs(x - a) < 6) this.held = { edge: "left" };
    else if (Math.abs(x - b) < 6) this.held = { edge: "right" };
    else {
      if (x < a || x > b) {
        const middle = overview.time(x);
        view.show(middle - view.length / 2, middle + view.length / 2);
      }
      this.held = { grip: overview.time(x) - view.t0 };
    }
  }

  #pull(event) {
    if (!this.held) return;
    const { view } = this.page, time = this.chart.overview.time(event.offsetX);
    if (this.held.edge === "left") view.show(Math.min(time, view.t1), view.t1);
    else if (this.held.edge === "right") view.show(view.t0, Math.max(time, view.t0));
    else view.show(time - this.held.grip, time - this.held.grip + view.length);
  }
}
