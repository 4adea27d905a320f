// One timeline on a canvas: a row per stream, a memory curve under each device.

const GUTTER = 132, AXIS = 24, TALL = 24, LOW = 13, MEMORY = 38, GAP = 12;
const PRINTED = 2, MOST_PIXELS = 16000; // on paper: pixels per CSS pixel, and how high a canvas may be in all
const MARK = { none: 0, chain: 1, direct: 2, self: 3 }; // how a box is related to the selected one

class Chart {
  /** `page` has: view, palette, options {communication, memory, critical}, found (Set or null), selection. */
  constructor(page, timeline, number) {
    this.page = page;
    this.timeline = timeline;
    this.number = number;
    this.marks = new Uint8Array(timeline.n);
    this.shades = new Uint8Array(timeline.n); // the number of each box's colour
    this.hover = null;
    this.#elements();
    // Most of a frame is an array of pixels, made here: a canvas in the memory of a graphics card would have to be sent them all the same.
    this.context = this.canvas.getContext("2d", { alpha: false, willReadFrequently: true });
    this.plot = new Plot(this);
    this.painted = null; // what the plot shows, as text; null when it is out of date
  }

  #elements() {
    const { timeline } = this;
    const make = (tag, name, parent) => {
      const element = parent.appendChild(document.createElement(tag));
      if (name) element.className = name;
      return element;
    };
    this.root = document.createElement("div");
    this.root.className = "chart";
    const caption = make("div", "caption", this.root);
    make("b", "", caption).textContent = timeline.name;
    make("span", "badge", caption).textContent = timeline.source;
    make("span", "", caption).textContent =
      `${seconds(timeline.seconds)} · bubble ${percent(timeline.bubble)} · ${plural(timeline.numDevices, "device")}`;
    this.overview = new Overview(this);
    this.root.append(this.overview.canvas);
    this.rowsElement = make("div", "rows", this.root);
    this.rowsElement.tabIndex = 0;
    this.rowsElement.setAttribute("role", "application");
    this.rowsElement.setAttribute("aria-label", `Timeline ${timeline.name}: arrow keys select boxes, ? lists all keys`);
    this.canvas = make("canvas", "", this.rowsElement);
    this.extent = make("div", "extent", this.rowsElement);
  }

  /** Places the rows; to be called when options change. Few rows are made up to 1.7 times as high, to use the space. */
  layout() {
    this.#place(1);
    const stretch = this.page.printing ? 1 : Math.min(1.7, (this.shown ?? 0) / this.height);
    if (stretch > 1) this.#place(stretch);
  }

  #place(stretch) {
    const { communication, memory } = this.page.options;
    const most = this.timeline.devices.reduce((a, d) => Math.max(a, d.memory.peak), 0);
    this.rows = [];
    this.rowOfLane = new Array(this.timeline.lanes.length).fill(null);
    let y = AXIS + 6;
    this.timeline.devices.forEach((device, number) => {
      const top = y;
      for (const lane of device.lanes) {
        if (!lane.computes && !communication) continue;
        const row = { lane, device, first: y === top, y, height: Math.round(lane.computes ? TALL * stretch : LOW * Math.min(stretch, 1.25)) };
        this.rowOfLane[lane.number] = row;
        this.rows.push(row);
        y += row.height + 2;
      }
      if (memory && device.memory.times.length) {
        const height = Math.round(MEMORY * stretch);
        this.rows.push({ memory: device.memory, device, y: y + 2, height, most });
        y += height + 4;
      }
      this.rows.push({ band: number % 2, device, y: top - GAP / 2, height: y - top + GAP });
      y += GAP;
    });
    this.height = y;
    this.extent.style.height = `${y}px`;
  }

  /** Fits the canvases to the space there is; on paper, to all rows. */
  resize() {
    const { printing } = this.page;
    this.width = this.rowsElement.clientWidth;
    this.shown = this.rowsElement.clientHeight;
    this.layout();
    if (printing) this.shown = this.height;
    const ratio = printing ? Math.max(1, Math.min(PRINTED, MOST_PIXELS / this.shown)) : window.devicePixelRatio || 1;
    this.canvas.style.height = printing ? "auto" : `${this.shown}px`;
    for (const [canvas, width, height] of [[this.canvas, this.width, this.shown], [this.overview.canvas, this.width, OVERVIEW]]) {
      canvas.width = Math.max(1, Math.round(width * ratio));
      canvas.height = Math.max(1, Math.round(height * ratio));
    }
    this.ratio = ratio;
    this.overview.picture = this.painted = null;
  }

  get scroll() { return this.page.printing ? 0 : this.rowsElement.scrollTop; }
  get plotWidth() { return Math.max(1, this.width - GUTTER); }

  /** What the chart's times are multiplied with to be the view's: 1, unless steps are drawn equally long. */
  get factor() {
    const { page, timeline } = this;
    return page.options.equal ? Math.max(...page.timelines.map((t) => t.seconds)) / timeline.seconds : 1;
  }

  /** The times of this timeline between which it is shown. */
  get t0() { return this.page.view.t0 / this.factor; }
  get t1() { return this.page.view.t1 / this.factor; }
  get scale() { return this.plotWidth / (this.t1 - this.t0); }
  x(time) { return GUTTER + (time - this.t0) * this.scale; }
  time(x) { return this.t0 + (x - GUTTER) / this.scale; }

  /** The box at a point of the canvas, in CSS pixels, or -1. */
  hit(x, y) {
    if (x < GUTTER || y < AXIS) return -1;
    const at = y + this.scroll;
    const row = this.rows.find((r) => r.lane && at >= r.y && at < r.y + r.height);
    return row ? this.timeline.at(row.lane, this.time(x), 1.5 / this.scale) : -1;
  }

  /** The memory row at a point and the index of its curve there, or null. */
  hitMemory(x, y) {
    const at = y + this.scroll;
    const row = x >= GUTTER && y >= AXIS && this.rows.find((r) => r.memory && at >= r.y && at < r.y + r.height);
    if (!row) return null;
    const { times } = row.memory, time = this.time(x);
    const i = search(0, times.length, (k) => times[k] > time) - 1;
    return i < 0 ? null : { row, i };
  }

  /** Scroll so that a box's row is seen. */
  reveal(i) {
    const row = this.rowOfLane[this.timeline.laneOf[i]];
    if (!row) return;
    const { scroll, shown } = this;
    if (row.y < scroll + AXIS + 8) this.rowsElement.scrollTop = row.y - AXIS - 24;
    else if (row.y + row.height > scroll + shown - 8) this.rowsElement.scrollTop = row.y + row.height - shown + 60;
  }


  get palette() { return this.page.palette; }
  get plotLeft() { return Math.round(GUTTER * this.ratio); }
  get plotPixels() { return Math.max(1, this.canvas.width - this.plotLeft); }

  /** Times of the marks on the axis. */
  ticks() {
    const step = this.step, found = [], { t0, t1 } = this;
    for (let k = Math.ceil(t0 / step); k * step <= t1; k++) found.push(k * step);
    return found;
  }

  /** Time between two marks. */
  get step() { return niceStep(95 / this.scale); }

  // ------------------------------------------------------------------ drawing

  /** To be called when colours change: another selection, search, theme or option. */
  shade() {
    const { page, marks, timeline: t, number, shades } = this;
    const found = page.found?.[number];
    let dim = () => false; // is something singled out, and it is not that?
    if (found) dim = (i) => !found.has(i) && marks[i] !== MARK.self;
    else if (page.selection) dim = (i) => marks[i] === MARK.none;
    else if (page.options.critical) dim = (i) => !t.critical[i];
    for (let i = 0; i < t.n; i++) shades[i] = boxColour(t.passOf[i], t.odd[i], t.isMessage(i), dim(i));
    this.painted = null;
  }

  /** Whether all is drawn: new texts take several turns. */
  draw() {
    const c = this.context, { ratio, plotLeft } = this;
    const state = `${this.t0} ${this.t1} ${this.scroll}`;
    if (this.painted !== state) {
      const complete = this.plot.paint();
      this.painted = complete ? state : null;
      if (!complete) this.page.invalidate();
    }
    c.setTransform(1, 0, 0, 1, 0, 0);
    this.plot.raster.draw(c, plotLeft, 0);
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.save();
    c.beginPath();
    c.rect(GUTTER, AXIS, this.plotWidth, this.shown - AXIS);
    c.clip();
    drawRelations(this, c);
    c.restore();
    drawNames(this, c);
    drawAxis(this, c);
    this.overview.draw();
    return this.painted !== null;
  }
}
