// One timeline on a canvas: a row per stream, a memory curve under each device.

const GUTTER = 132, AXIS = 24, TALL = 24, LOW = 13, MEMORY = 38, GAP = 12;
const FONT = '11px system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif';
const SMALL_FONT = FONT.replace("11px", "10px");
const WIDE = 2.5; // a box at least so many pixels wide is a rectangle; narrower ones are blended per pixel
const ROUNDED = 4000; // at most so many boxes get rounded corners
const MARK = { none: 0, chain: 1, direct: 2, self: 3 }; // how a box is related to the selected one

class Chart {
  /** `page` has: view, palette, options {communication, memory, critical}, found (Set or null), selection. */
  constructor(page, timeline, number) {
    this.page = page;
    this.timeline = timeline;
    this.number = number;
    this.marks = new Uint8Array(timeline.n);
    this.hover = null;
    this.#elements();
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
      `${seconds(timeline.seconds)}${timeUnit === "s" ? "" : ` ${timeUnit}`} · bubble ${percent(timeline.bubble)} · ${timeline.numDevices} devices`;
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
    const stretch = Math.min(1.7, (this.shown ?? 0) / this.height);
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
        const row = { lane, device, y, height: Math.round(lane.computes ? TALL * stretch : LOW * Math.min(stretch, 1.25)) };
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

  /** Fits the canvases to the space there is. */
  resize() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.rowsElement.clientWidth;
    this.shown = this.rowsElement.clientHeight;
    this.canvas.style.height = `${this.shown}px`;
    for (const [canvas, width, height] of [[this.canvas, this.width, this.shown], [this.overview.canvas, this.width, OVERVIEW]]) {
      canvas.width = Math.max(1, Math.round(width * ratio));
      canvas.height = Math.max(1, Math.round(height * ratio));
    }
    this.overview.canvas.style.width = `${this.width}px`;
    this.ratio = ratio;
    this.overview.picture = null;
    this.layout();
  }

  get scroll() { return this.rowsElement.scrollTop; }
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

  draw() {
    const c = this.canvas.getContext("2d");
    const { palette } = this.page;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = palette.panel;
    c.fillRect(0, 0, this.width, this.shown);
    const rows = this.rows
      .map((row) => ({ ...row, y: row.y - this.scroll }))
      .filter((row) => row.y < this.shown && row.y + row.height > AXIS);
    for (const row of rows) {
      if (row.band) { c.fillStyle = palette.sunk; c.globalAlpha = 0.45; c.fillRect(0, row.y, this.width, row.height); c.globalAlpha = 1; }
    }
    this.#grid(c);
    c.save();
    c.beginPath();
    c.rect(GUTTER, AXIS, this.plotWidth, this.shown - AXIS);
    c.clip();
    const lanes = rows.filter((row) => row.lane);
    for (const row of rows) if (row.memory) this.#memory(c, row);
    this.#boxes(c, lanes);
    if (this.page.options.critical) this.#criticalPath(c);
    this.#relations(c);
    c.restore();
    this.#gutter(c, rows);
    this.#axis(c);
    this.overview.draw();
  }

  // ------------------------------------------------------------------ boxes

  /** Whether a box is drawn dimmed: something is singled out, and it is not that. */
  #dim() {
    const { page, marks, timeline, number } = this;
    const found = page.found?.[number];
    if (found) return (i) => !found.has(i) && marks[i] !== MARK.self;
    if (page.selection) return (i) => marks[i] === MARK.none;
    if (page.options.critical) return (i) => !timeline.critical[i];
    return () => false;
  }

  #boxes(c, lanes) {
    const t = this.timeline, { palette } = this.page, { t0, t1, scale } = this;
    const dim = this.#dim();
    const batches = palette.css.map(() => []); // per colour: x, y, width, height, …
    const texts = [], critical = [];
    const pixels = Math.round(this.plotWidth * this.ratio);
    const blended = this.#blender(lanes.length, pixels);
    const perPixel = (t1 - t0) / pixels;
    let count = 0;
    lanes.forEach((row, line) => {
      const { lane, y, height } = row;
      for (let i = t.firstEndingAfter(lane, t0); i < lane.last && t.start[i] < t1; i++) {
        const left = GUTTER + (t.start[i] - t0) * scale, right = GUTTER + (t.end[i] - t0) * scale, width = right - left;
        const colour = boxColour(t.passOf[i], t.odd[i], t.isMessage(i), dim(i));
        if (width * this.ratio < WIDE) {
          blended.add(line, (t.start[i] - t0) / perPixel, (t.end[i] - t0) / perPixel, palette.colours[colour]);
        } else {
          const x = Math.max(left, GUTTER - 8), end = Math.min(right, this.width + 8);
          const gap = width > 5 ? 1 : 0;
          batches[colour].push(x, y, Math.max(end - x - gap, 0.5), height);
          if (end - x > 9) texts.push(i, Math.max(x, GUTTER), y, end - Math.max(x, GUTTER) - gap, height, colour);
          count++;
        }
        if (t.critical[i]) critical.push(left, Math.max(width, 1), y + height);
      }
    });
    blended.draw(c, lanes, pixels);
    const rounded = count < ROUNDED;
    batches.forEach((batch, colour) => {
      if (!batch.length) return;
      c.fillStyle = palette.css[colour];
      if (rounded) {
        c.beginPath();
        for (let k = 0; k < batch.length; k += 4) {
          const [x, y, w, h] = batch.slice(k, k + 4);
          c.roundRect(x, y, w, h, Math.min(3, w / 4));
        }
        c.fill();
      } else {
        for (let k = 0; k < batch.length; k += 4) c.fillRect(batch[k], batch[k + 1], batch[k + 2], batch[k + 3]);
      }
    });
    c.fillStyle = palette.critical;
    for (let k = 0; k < critical.length; k += 3) c.fillRect(critical[k], critical[k + 2] - 2.5, critical[k + 1], 2.5);
    this.#texts(c, texts);
  }

  /** Narrow boxes: their colours are averaged per pixel, so that what is drawn is the share of time of each. */
  #blender(lines, pixels) {
    const sums = new Float32Array(4 * lines * pixels); // red, green, blue, coverage
    const { back } = this.page.palette;
    return {
      add(line, from, to, colour) {
        let p = Math.max(0, Math.floor(from));
        for (; p < to && p < pixels; p++) {
          const share = Math.min(to, p + 1) - Math.max(from, p);
          const k = 4 * (line * pixels + p);
          sums[k] += share * colour[0]; sums[k + 1] += share * colour[1]; sums[k + 2] += share * colour[2];
          sums[k + 3] += share;
        }
      },
      draw: (c, lanes) => {
        if (!lines || !pixels) return;
        const image = new ImageData(pixels, lines);
        const { data } = image;
        let any = false;
        for (let k = 0; k < sums.length; k += 4) {
          const share = sums[k + 3];
          if (share === 0) continue;
          any = true;
          const alpha = Math.min(1, Math.max(share, 0.3)); // a lone short box stays visible
          for (let j = 0; j < 3; j++) data[k + j] = sums[k + j] / share * alpha + back[j] * (1 - alpha);
          data[k + 3] = 255;
        }
        if (!any) return;
        const strip = (this.strip ??= document.createElement("canvas"));
        strip.width = pixels; strip.height = lines;
        strip.getContext("2d").putImageData(image, 0, 0);
        c.imageSmoothingEnabled = false;
        lanes.forEach((row, line) => c.drawImage(strip, 0, line, pixels, 1, GUTTER, row.y, this.plotWidth, row.height));
      },
    };
  }

  #texts(c, texts) {
    const t = this.timeline, { palette } = this.page;
    c.textAlign = "center";
    c.textBaseline = "middle";
    let font = "";
    for (let k = 0; k < texts.length; k += 6) {
      const [i, x, y, width, height, colour] = texts.slice(k, k + 6);
      const wanted = height > 16 ? FONT : SMALL_FONT;
      if (wanted !== font) c.font = font = wanted;
      const text = this.#inside(c, i, width);
      if (!text) continue;
      c.fillStyle = palette.ink[colour];
      c.fillText(text, x + width / 2, y + height / 2 + 0.5 - (t.critical[i] && height > 16 ? 1 : 0));
    }
  }

  /** What fits into a box: its label, its microbatch, or nothing. */
  #inside(c, i, width) {
    const t = this.timeline;
    const label = t.text(i);
    if (width > 44 && this.#measure(c, label) < width - 8) return label;
    const short = t.microbatch[i] >= 0 ? String(t.microbatch[i]) : t.strings[t.pass[i]].slice(0, 1);
    return short && this.#measure(c, short) < width - 3 ? short : "";
  }

  #measure(c, text) {
    this.widths ??= new Map();
    const key = c.font.slice(0, 2) + text;
    if (!this.widths.has(key)) this.widths.set(key, c.measureText(text).width);
    return this.widths.get(key);
  }

  // ------------------------------------------------------------------ what belongs together

  #point(i, time) {
    const row = this.rowOfLane[this.timeline.laneOf[i]];
    return row && [this.x(time), row.y - this.scroll + row.height / 2];
  }

  #curve(c, from, to) {
    const a = this.#point(from, this.timeline.end[from]), b = this.#point(to, this.timeline.start[to]);
    if (!a || !b) return;
    if (Math.max(a[0], b[0]) < GUTTER - 50 || Math.min(a[0], b[0]) > this.width + 50) return;
    const bend = Math.max(10, Math.abs(b[0] - a[0]) / 2);
    c.moveTo(a[0], a[1]);
    c.bezierCurveTo(a[0] + bend, a[1], b[0] - bend, b[1], b[0], b[1]);
  }

  #criticalPath(c) {
    const { path } = this.timeline;
    c.strokeStyle = this.page.palette.critical;
    c.lineWidth = 1.5;
    c.beginPath();
    for (let k = 0; k + 1 < path.length; k++) {
      if (this.timeline.laneOf[path[k]] !== this.timeline.laneOf[path[k + 1]]) this.#curve(c, path[k], path[k + 1]);
    }
    c.stroke();
  }

  #relations(c) {
    const { page, timeline: t, hover } = this;
    const { selection, palette } = page;
    if (selection?.chart === this) {
      const i = selection.box;
      c.strokeStyle = palette.text;
      c.lineWidth = 1.5;
      c.beginPath();
      for (const j of t.before(i)) this.#curve(c, j, i);
      c.stroke();
      c.setLineDash([5, 4]);
      c.beginPath();
      for (const j of t.after(i)) this.#curve(c, i, j);
      c.stroke();
      c.setLineDash([]);
      for (const j of [...t.before(i), ...t.after(i)]) this.#outline(c, j, palette.text, 1.25);
    }
    if (selection) {
      const mine = selection.chart === this ? selection.box : selection.counterpart;
      if (mine >= 0) for (const j of t.members.get(t.meeting[mine]) ?? [mine]) this.#outline(c, j, palette.text, j === mine ? 2.5 : 1.25);
    }
    if (hover !== null && hover >= 0) this.#outline(c, hover, palette.text, 1.5);
  }

  #outline(c, i, colour, width) {
    const row = this.rowOfLane[this.timeline.laneOf[i]];
    if (!row) return;
    const left = this.x(this.timeline.start[i]), right = this.x(this.timeline.end[i]);
    if (right < GUTTER - 9 || left > this.width + 9) return;
    const x = Math.max(left, GUTTER - 9), w = Math.max(Math.min(right, this.width + 9) - x - 1, 2);
    c.lineWidth = width;
    c.strokeStyle = colour;
    c.beginPath();
    c.roundRect(x - 0.5, row.y - this.scroll - 0.5, w + 1, row.height + 1, 3);
    c.stroke();
  }

  // ------------------------------------------------------------------ memory

  #memory(c, { memory, y, height, most }) {
    if (!most) return;
    const { times, total, categories } = memory;
    const columns = this.#columns(times, total);
    const unit = (height - 3) / most;
    const floor = y + height;
    const below = new Float64Array(columns.length);
    categories.forEach(({ name, nbytes }, number) => {
      c.fillStyle = this.page.palette.memory(name, number);
      c.globalAlpha = 0.72;
      c.beginPath();
      columns.forEach(([x, until, k], n) => {
        const h = nbytes[k] * unit;
        if (h > 0) c.rect(x, floor - below[n] - h, until - x, h);
        below[n] += h;
      });
      c.fill();
    });
    c.globalAlpha = 1;
    c.strokeStyle = this.page.palette.line;
    c.lineWidth = 1;
    c.beginPath();
    c.moveTo(GUTTER, floor + 0.5);
    c.lineTo(this.width, floor + 0.5);
    c.stroke();
  }

  /** [x, end of x, index] of the curve, where points that share a pixel are one: the one with the most bytes. */
  #columns(times, total) {
    const found = [], { t0, t1, scale } = this;
    let i = Math.max(0, search(0, times.length, (k) => times[k] > t0) - 1);
    const snap = (time) => Math.round((GUTTER + (time - t0) * scale) * this.ratio) / this.ratio;
    while (i < times.length && times[i] < t1) {
      const x = snap(times[i]);
      let best = i;
      for (i++; i < times.length && snap(times[i]) === x; i++) if (total[i] >= total[best]) best = i;
      const until = i < times.length ? snap(times[i]) : this.x(Math.min(this.timeline.until, this.timeline.seconds));
      found.push([x, until, best]);
    }
    return found;
  }

  // ------------------------------------------------------------------ around the rows

  get #step() { return niceStep(95 / this.scale); }

  #ticks() {
    const step = this.#step, found = [], { t0, t1 } = this;
    for (let k = Math.ceil(t0 / step); k * step <= t1; k++) found.push(k * step);
    return found;
  }

  #grid(c) {
    c.strokeStyle = this.page.palette.line;
    c.globalAlpha = 0.7;
    c.lineWidth = 1;
    c.beginPath();
    for (const time of this.#ticks()) {
      const x = Math.round(this.x(time)) + 0.5;
      c.moveTo(x, AXIS);
      c.lineTo(x, this.shown);
    }
    c.stroke();
    c.globalAlpha = 1;
  }

  #axis(c) {
    const { palette, cursor, range } = this.page, { factor, t1 } = this;
    c.fillStyle = palette.panel;
    c.fillRect(0, 0, this.width, AXIS);
    c.fillStyle = palette.soft;
    c.font = FONT;
    c.textBaseline = "middle";
    c.textAlign = "left";
    c.fillText(timeUnit === "s" ? "time" : `time, ${timeUnit}`, 12, AXIS / 2);
    c.save();
    c.beginPath();
    c.rect(GUTTER - 20, 0, this.width, this.shown);
    c.clip();
    c.textAlign = "center";
    const step = this.#step;
    for (const time of this.#ticks()) {
      const x = this.x(time);
      if (x > this.width - 24) continue;
      c.fillText(tickText(time, step, t1), x, AXIS / 2);
    }
    c.restore();
    c.fillStyle = palette.line;
    c.fillRect(0, AXIS - 1, this.width, 1);
    if (cursor !== null) {
      const x = this.x(cursor / factor);
      if (x >= GUTTER) {
        c.fillStyle = palette.soft;
        c.globalAlpha = 0.5;
        c.fillRect(x, AXIS, 1, this.shown);
        c.globalAlpha = 1;
      }
    }
    if (range) {
      const [a, b] = range.map((t) => this.x(t / factor)).sort((p, q) => p - q);
      c.fillStyle = palette.accent;
      c.globalAlpha = 0.16;
      c.fillRect(a, 0, b - a, this.shown);
      c.globalAlpha = 1;
    }
  }

  #gutter(c, rows) {
    const { palette } = this.page;
    c.fillStyle = palette.panel;
    c.fillRect(0, 0, GUTTER - 4, this.shown);
    for (const row of rows) {
      if (row.band) { c.fillStyle = palette.sunk; c.globalAlpha = 0.45; c.fillRect(0, row.y, GUTTER - 4, row.height); c.globalAlpha = 1; }
    }
    c.textBaseline = "middle";
    let device = null;
    for (const row of rows.filter((r) => r.band === undefined)) {
      const middle = row.y + row.height / 2;
      c.textAlign = "left";
      if (row.device !== device && row.lane) {
        c.fillStyle = palette.text;
        c.font = `600 ${FONT}`;
        const others = row.device.stands_for.count - 1;
        const name = `device ${row.device.device}${others > 0 ? ` +${others}` : ""}`;
        c.fillText(name, 12, middle);
        const left = GUTTER - 12 - 12 - c.measureText(name).width - 6;
        c.textAlign = "right";
        c.font = SMALL_FONT;
        c.fillStyle = palette.soft;
        const busy = `${Math.round(100 * (1 - row.device.bubble))} %`;
        const text = [`${busy} busy`, busy].find((t) => c.measureText(t).width <= left);
        if (text) c.fillText(text, GUTTER - 12, middle);
      } else if (row.lane) {
        c.fillStyle = palette.soft;
        c.font = SMALL_FONT;
        c.fillText(clip(c, row.lane.stream, GUTTER - 28), 12, middle);
      } else {
        c.fillStyle = palette.soft;
        c.font = SMALL_FONT;
        c.fillText("memory", 12, row.y + 9);
        c.fillText(`peak ${bytes(row.device.peak)}`, 12, row.y + 23);
      }
      device = row.device;
    }
    c.fillStyle = palette.line;
    c.fillRect(GUTTER - 5, AXIS, 1, this.shown);
  }
}

/** A mark of the axis, in the unit that suits the distance between marks and the size of the step. */
function tickText(time, step, latest) {
  const [size, unit] = unitFor(latest);
  const decimals = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  return `${(time / size).toFixed(decimals)} ${unit}`.trim();
}

function clip(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  while (text && c.measureText(`${text}…`).width > width) text = text.slice(0, -1);
  return `${text}…`;
}
