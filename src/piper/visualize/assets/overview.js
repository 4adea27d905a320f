// The whole step in a small picture above a chart, and which part of it is shown.

const OVERVIEW = 34; // its height in pixels

class Overview {
  constructor(chart) {
    this.chart = chart;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "overview";
    this.picture = null; // drawn when first needed; null again when it is out of date
  }

x(time) {
    const { page: { view: { from, latest } }, plotWidth } = this.chart;
    return GUTTER + (time - from) / (latest - from) * plotWidth;
  }

  time(x) {
    const { page: { view: { from, latest } }, plotWidth } = this.chart;
    return from + (x - GUTTER) / plotWidth * (latest - from);
  }

  draw() {
    const { page: { palette, view }, width, plotWidth, ratio } = this.chart, height = OVERVIEW;
    const c = this.canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.picture ??= this.#summary(height);
    c.fillStyle = palette.panel;
    c.fillRect(0, 0, width, height);
    c.drawImage(this.picture, GUTTER, 0, plotWidth, height);
    c.fillStyle = palette.soft;
    c.font = SMALL_FONT;
    c.textBaseline = "middle";
    c.textAlign = "left";
    c.fillText("devices computing", 12, height / 2);
    const a = this.x(view.t0), b = this.x(view.t1);
    c.fillStyle = palette.panel;
    c.globalAlpha = 0.68;
    c.fillRect(GUTTER, 0, a - GUTTER, height);
    c.fillRect(b, 0, width - b, height);
    c.globalAlpha = 1;
    c.strokeStyle = palette.accent;
    c.lineWidth = 1.5;
    c.strokeRect(a + 0.75, 0.75, Math.max(2, b - a - 1.5), height - 1.5);
  }

  /** How many devices compute, by pass, over the whole step. */
  #summary(height) {
    const { factor, plotWidth, ratio, timeline: t, page: { palette, view: { from, latest } } } = this.chart;
    const picture = document.createElement("canvas"), columns = Math.max(1, Math.round(plotWidth));
    picture.width = columns;
    picture.height = Math.round(height * ratio);
    const sums = PASSES.map(() => new Float64Array(columns));
    const perColumn = (latest - from) / columns;
    let weight = 0;
    for (const device of t.devices) {
      weight += device.stands_for.count;
      for (const lane of device.lanes) {
        if (!lane.computes) continue;
        for (let i = lane.first; i < lane.last; i++) {
          const a = (t.start[i] * factor - from) / perColumn, b = (t.end[i] * factor - from) / perColumn;
          for (let p = Math.max(0, Math.floor(a)); p < b && p < columns; p++) {
            sums[t.passOf[i]][p] += (Math.min(b, p + 1) - Math.max(a, p)) * device.stands_for.count;
          }
        }
      }
    }
    const c = picture.getContext("2d"), room = picture.height - 3;
    const level = new Float64Array(columns);
    sums.forEach((sum, pass) => {
      c.fillStyle = palette.css[boxColour(pass, false, false, false)];
      for (let p = 0; p < columns; p++) {
        if (!sum[p]) continue;
        const h = sum[p] / weight * room;
        c.fillRect(p, picture.height - level[p] - h, 1, h);
        level[p] += h;
      }
    });
    return picture;
  }
}
