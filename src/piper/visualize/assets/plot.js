// What lies right of the names of the streams: bands, marks of time, boxes, memory.
//
// A canvas takes about a microsecond for each rectangle or text, however small it is; an array of pixels a few nanoseconds. So
// whatever there may be a hundred thousand of is painted into an array, and handed to the canvas as one picture.

const WIDE = 2.5; // a box at least so many pixels of the device wide has edges; narrower ones are blended per pixel
const FAINT = 0.3; // the least visible share of a pixel: a lone short box does not vanish
const STRIPE = 2.5; // CSS pixels: height of the mark of critical boxes

class Plot {
  constructor(chart) {
    this.chart = chart;
    this.raster = new Raster();
    this.large = new Labels(11);
    this.small = new Labels(10);
    this.edges = []; // of the lane that is painted: box, left, right, for each box that is wide enough for corners or a text
  }

  /** Paints all of it; false if texts are still missing. */
  paint() {
    const { chart, raster } = this, { ratio, palette } = chart;
    raster.resize(chart.plotPixels, Math.max(1, Math.round(chart.shown * ratio)));
    if (this.sums?.length !== 4 * raster.width) this.sums = new Float32Array(4 * raster.width);
    Object.assign(this, { scroll: chart.scroll, t0: chart.t0, t1: chart.t1 });
    this.perSecond = raster.width / (this.t1 - this.t0);
    this.corners = [2, 3].map((radius) => corner(Math.round(radius * ratio)));
    for (const labels of [this.large, this.small]) { labels.reset(ratio); labels.begin(); }
    raster.pixels.fill(palette.pixels.panel);
    const shown = chart.rows.filter((row) => row.y < this.scroll + chart.shown && row.y + row.height > this.scroll + AXIS);
    for (const row of shown) if (row.band) raster.fill(0, this.#y(row.y), raster.width, this.#y(row.y + row.height), palette.pixels.band);
    const step = Math.max(1, Math.round(ratio));
    for (const time of chart.ticks()) {
      const x = this.#x(time);
      raster.fill(x, 0, x + step, raster.height, palette.pixels.line);
    }
    for (const row of shown) {
      if (row.lane) this.#lane(row);
      else if (row.memory) this.#memory(row);
    }
    return !this.large.incomplete && !this.small.incomplete;
  }

  #x(time) { return Math.round((time - this.t0) * this.perSecond); }
  #y(y) { return Math.round((y - this.scroll) * this.chart.ratio); }

  // ------------------------------------------------------------------ boxes

  #lane(row) {
    const { raster, chart } = this;
    const top = this.#y(row.y), bottom = top + Math.round(row.height * chart.ratio);
    const first = Math.max(top, 0), last = Math.min(bottom, raster.height);
    if (last <= first) return;
    this.#line(row.lane, first * raster.width);
    raster.repeat(first, last);
    this.#round(top, bottom, chart.palette.backs[row.device.number % 2]);
    this.#stripes(row.lane, bottom);
    this.#texts(row, (top + bottom) / 2);
  }

  /** Paint the boxes of a lane into the line of pixels that begins at `line`. */
  #line(lane, line) {
    const { chart: { timeline: t, shades, palette }, raster, sums, edges, perSecond, t0, t1 } = this;
    const { pixels, width } = raster, { start, end } = t, { packed: colours, parts } = palette;
    const gapFrom = 5 * this.chart.ratio, gap = Math.max(1, Math.floor(this.chart.ratio)), noted = 6 * this.chart.ratio;
    let low = width, high = 0; // the pixels in which there are narrow boxes
    edges.length = 0;
    for (let i = t.firstEndingAfter(lane, t0); i < lane.last && start[i] <= t1; i++) {
      const a = (start[i] - t0) * perSecond, b = (end[i] - t0) * perSecond;
      if (b - a >= WIDE) {
        const left = Math.round(a), right = Math.round(b) - (b - a > gapFrom ? gap : 0);
        pixels.fill(colours[shades[i]], line + Math.max(left, 0), line + Math.max(Math.min(right, width), 0));
        if (right - left >= noted) edges.push(i, left, right);
        continue;
      }
      const from = Math.max(0, Math.floor(a)), colour = 3 * shades[i];
      for (let p = from; p < width && (p < b || p === from); p++) {
        const share = Math.max(Math.min(b, p + 1) - Math.max(a, p), 1e-3), k = 4 * p;
        sums[k] += share * parts[colour];
        sums[k + 1] += share * parts[colour + 1];
        sums[k + 2] += share * parts[colour + 2];
        sums[k + 3] += share;
        if (p < low) low = p;
        if (p >= high) high = p + 1;
      }
    }
    for (let p = low; p < high; p++) {
      const k = 4 * p, share = sums[k + 3];
      if (share > 0) raster.blend(line + p, sums[k] / share, sums[k + 1] / share, sums[k + 2] / share, Math.min(1, Math.max(share, FAINT)));
    }
    if (high > low) sums.fill(0, 4 * low, 4 * high);
  }

  /** Take the corners off the boxes in `edges`. */
  #round(top, bottom, background) {
    const { raster, edges, chart: { ratio } } = this, { width, height } = raster;
    for (let n = 0; n < edges.length; n += 3) {
      const left = edges[n + 1], right = edges[n + 2];
      for (const [dx, dy, share] of this.corners[right - left < 12 * ratio ? 0 : 1]) {
        for (const x of [left + dx, right - 1 - dx]) {
          if (x < 0 || x >= width) continue;
          for (const y of [top + dy, bottom - 1 - dy]) {
            if (y >= 0 && y < height) raster.blend(y * width + x, background[0], background[1], background[2], share);
          }
        }
      }
    }
  }

  /** A stripe at the lower edge of boxes on the critical path. */
  #stripes(lane, bottom) {
    const { chart: { timeline: t, palette, ratio }, raster, perSecond, t0, t1 } = this;
    const height = Math.round(STRIPE * ratio), { criticals } = lane;
    let done = -1; // the last pixel that has one
    for (let n = search(0, criticals.length, (k) => t.end[criticals[k]] > t0); n < criticals.length; n++) {
      const i = criticals[n];
      if (t.start[i] > t1) break;
      const left = Math.max(done, Math.round((t.start[i] - t0) * perSecond));
      const right = Math.max(Math.round((t.end[i] - t0) * perSecond), left + (left > done ? 1 : 0));
      if (right <= left) continue;
      raster.fill(left, bottom - height, right, bottom, palette.pixels.critical);
      done = right;
    }
  }

  // ------------------------------------------------------------------ texts

  #texts(row, middle) {
    const { chart: { timeline: t, shades, palette, ratio }, raster, edges } = this;
    const tall = row.height > 16, labels = tall ? this.large : this.small;
    for (let n = 0; n < edges.length; n += 3) {
      const i = edges[n], left = Math.max(edges[n + 1], 0), right = Math.min(edges[n + 2], raster.width);
      if (right - left < 8 * ratio) continue;
      const text = inside(t, i, labels, (right - left) / ratio);
      if (text) labels.paint(raster, text, (left + right) / 2, middle - (t.critical[i] ? ratio : 0), palette.inks[shades[i]]);
    }
  }

  // ------------------------------------------------------------------ memory

  #memory({ memory, y, height, most }) {
    const { raster, chart: { palette, ratio } } = this, { categories } = memory;
    const bottom = this.#y(y) + Math.round(height * ratio), unit = (height - 3) * ratio / most;
    const colours = categories.map(({ name, number }) => palette.memoryPixels(name, number));
    if (most > 0) {
      this.#runs(memory, (left, right, k) => {
        let low = bottom, sum = 0;
        for (let n = 0; n < categories.length; n++) {
          sum += categories[n].nbytes[k];
          const high = bottom - Math.round(sum * unit);
          this.#column(left, high, right, low, colours[n]);
          low = high;
        }
      });
    }
    raster.fill(0, bottom, raster.width, bottom + Math.max(1, Math.round(ratio)), palette.pixels.edge);
  }

  /** Like `Raster.fill`, and quick for narrow columns. */
  #column(left, top, right, bottom, colour) {
    const { raster } = this, { pixels, width } = raster;
    if (right - left > 4) { raster.fill(left, top, right, bottom, colour); return; }
    const last = Math.min(bottom, raster.height);
    for (let y = Math.max(top, 0); y < last; y++) {
      for (let x = left, at = y * width + left; x < right; x++, at++) pixels[at] = colour;
    }
  }

  /** Calls back with each stretch of pixels and the index of what the curve says there: of points that share a pixel, the one with the most bytes. */
  #runs({ times, total }, found) {
    const { chart: { timeline: t }, raster: { width }, t0, t1 } = this;
    const end = Math.min(width, this.#x(Math.min(t.until, t.seconds)));
    let i = Math.max(0, search(0, times.length, (k) => times[k] > t0) - 1);
    while (i < times.length && times[i] < t1) {
      const x = this.#x(times[i]);
      let best = i;
      for (i++; i < times.length && this.#x(times[i]) === x; i++) if (total[i] >= total[best]) best = i;
      const right = i < times.length ? Math.min(this.#x(times[i]), width) : end;
      if (right > Math.max(x, 0)) found(Math.max(x, 0), right, best);
    }
  }
}

/** What fits into a box: its label, its microbatch, the letter of its pass, or nothing. */
function inside(t, i, labels, width) {
  const label = t.text(i);
  if (width > 44 && label.length < width && labels.width(label) < width - 8) return label;
  const short = t.microbatch[i] >= 0 ? String(t.microbatch[i]) : t.strings[t.pass[i]].slice(0, 1);
  return short && labels.width(short) < width - 3 ? short : "";
}

/** The pixels of a corner of a box that a circle of `radius` leaves out: [from the side, from the top or bottom, how much of it]. */
function corner(radius) {
  const found = [], fine = 4;
  for (let x = 0; x < radius; x++) {
    for (let y = 0; y < radius; y++) {
      let outside = 0;
      for (let u = 0.5; u < fine; u++) {
        for (let v = 0.5; v < fine; v++) if (Math.hypot(radius - x - u / fine, radius - y - v / fine) > radius) outside++;
      }
      if (outside) found.push([x, y, outside / fine ** 2]);
    }
  }
  return found;
}
