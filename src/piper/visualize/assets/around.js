// What stands around the boxes: names of devices and streams, the axis of time.

/** The axis above the boxes, where the mouse is, and what is being dragged. */
function drawAxis(chart, c) {
  const { page: { cursor, range }, palette, factor, t1, width, shown, step } = chart;
  c.fillStyle = palette.panel;
  c.fillRect(0, 0, width, AXIS);
  c.fillStyle = palette.soft;
  c.font = FONT;
  c.textBaseline = "middle";
  c.textAlign = "left";
  c.fillText(timeUnit === "s" ? "time" : `time, ${timeUnit}`, 12, AXIS / 2);
  c.textAlign = "center";
  let last = GUTTER - 20; // where the text before ends
  for (const time of chart.ticks()) {
    const x = chart.x(time), text = tickText(time, step, t1), half = c.measureText(text).width / 2;
    if (x - half < last + 8 || x + half > width - 2) continue;
    c.fillText(text, x, AXIS / 2);
    last = x + half;
  }
  c.fillStyle = palette.line;
  c.fillRect(0, AXIS - 1, width, 1);
  if (cursor !== null) {
    const x = chart.x(cursor / factor);
    if (x >= GUTTER) {
      c.fillStyle = palette.soft;
      c.globalAlpha = 0.5;
      c.fillRect(x, AXIS, 1, shown);
      c.globalAlpha = 1;
    }
  }
  if (range) {
    const [a, b] = range.map((t) => chart.x(t / factor)).sort((p, q) => p - q);
    c.fillStyle = palette.accent;
    c.globalAlpha = 0.16;
    c.fillRect(a, 0, b - a, shown);
    c.globalAlpha = 1;
  }
}

/** The names of devices and streams, left of the boxes. */
function drawNames(chart, c) {
  const { palette, shown, scroll } = chart;
  c.fillStyle = palette.panel;
  c.fillRect(0, 0, chart.plotLeft / chart.ratio, shown);
  const rows = chart.rows.filter((row) => row.y < scroll + shown && row.y + row.height > scroll + AXIS);
  c.fillStyle = css(palette.backs[1]);
  for (const row of rows) if (row.band) c.fillRect(0, row.y - scroll, GUTTER - 4, row.height);
  c.textBaseline = "middle";
  for (const row of rows) {
    const middle = row.y - scroll + row.height / 2;
    c.textAlign = "left";
    if (row.lane && row.first) deviceName(chart, c, row.device, middle);
    else if (row.lane) {
      c.fillStyle = palette.soft;
      c.font = SMALL_FONT;
      c.fillText(clip(c, row.lane.stream, GUTTER - 28), 12, middle);
    } else if (row.memory) {
      c.fillStyle = palette.soft;
      c.font = SMALL_FONT;
      c.fillText("memory", 12, row.y - scroll + 9);
      c.fillText(`peak ${bytes(row.device.peak)}`, 12, row.y - scroll + 23);
    }
  }
  c.fillStyle = palette.line;
  c.fillRect(GUTTER - 5, AXIS, 1, shown);
}

function deviceName(chart, c, device, y) {
  const { palette } = chart;
  c.fillStyle = palette.text;
  c.font = `600 ${FONT}`;
  const others = device.stands_for.count - 1;
  const name = `device ${device.device}${others > 0 ? ` +${others}` : ""}`;
  c.fillText(name, 12, y);
  const left = GUTTER - 12 - 12 - c.measureText(name).width - 6;
  c.textAlign = "right";
  c.font = SMALL_FONT;
  c.fillStyle = palette.soft;
  const busy = percent(1 - device.bubble, 0);
  const text = [`${busy} busy`, busy].find((words) => c.measureText(words).width <= left);
  if (text) c.fillText(text, GUTTER - 12, y);
}

/** A mark of the axis, in the unit that suits the distance between marks and the size of the step. */
function tickText(time, step, latest) {
  const [size, unit] = unitFor(latest);
  const decimals = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  const text = time / size >= 1e6 ? (time / size).toPrecision(Math.ceil(Math.log10(time / step) + 1)) : (time / size).toFixed(decimals);
  return `${text} ${unit}`.trim();
}

function clip(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  while (text && c.measureText(`${text}…`).width > width) text = text.slice(0, -1);
  return `${text}…`;
}
