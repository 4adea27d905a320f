// What belongs together: curves from box to box, and outlines.

const MOST_CURVES = 300; // per selected box and direction; more would be a carpet

/** What is drawn over the boxes of a chart. */
function drawRelations(chart, c) {
  const { page, timeline: t, hover } = chart, { selection, palette, options } = page;
  if (options.critical) criticalPath(chart, c);
  if (selection?.chart === chart) {
    const i = selection.box;
    for (const binding of [false, true]) {
      const shown = selection.relations.filter((pair) => pair[2] === binding).slice(0, MOST_CURVES);
      c.strokeStyle = binding ? palette.text : palette.soft;
      c.lineWidth = binding ? 1.75 : 1;
      c.setLineDash(binding ? [] : [4, 4]);
      c.beginPath();
      for (const [from, to] of shown) curve(chart, c, from, to);
      c.stroke();
      c.setLineDash([]);
      for (const [from, to] of shown) outline(chart, c, from === i ? to : from, c.strokeStyle, binding ? 1.5 : 1);
    }
  }
  if (selection) {
    const mine = selection.chart === chart ? selection.box : selection.counterpart;
    if (mine >= 0) for (const j of t.meets(mine)) outline(chart, c, j, palette.text, j === mine ? 2.5 : 1.25);
  }
  if (hover !== null && hover >= 0) outline(chart, c, hover, palette.text, 1.5);
}

/** Box i and each box that it waits for or that waits for it: [first, second, whether the second started when the first ended]. */
function relations(t, i) {
  return [...t.before(i).map((j) => [j, i, t.binds(j, i)]), ...t.after(i).map((j) => [i, j, t.binds(i, j)])];
}

/** Where a box is at a time, or nothing if its row is not there. */
function point(chart, i, time) {
  const row = chart.rowOfLane[chart.timeline.laneOf[i]];
  return row && [chart.x(time), row.y - chart.scroll + row.height / 2];
}

function curve(chart, c, from, to) {
  const { timeline: { start, end } } = chart;
  const a = point(chart, from, end[from]), b = point(chart, to, start[to]);
  if (!a || !b) return;
  if (Math.max(a[0], b[0]) < GUTTER - 50 || Math.min(a[0], b[0]) > chart.width + 50) return;
  const bend = Math.max(10, Math.abs(b[0] - a[0]) / 2);
  c.moveTo(a[0], a[1]);
  c.bezierCurveTo(a[0] + bend, a[1], b[0] - bend, b[1], b[0], b[1]);
}

/** The path's way from row to row; where several ways share a pixel, one of them. */
function criticalPath(chart, c) {
  const { timeline: { path, laneOf, start, end } } = chart;
  const drawn = new Set();
  c.strokeStyle = chart.palette.critical;
  c.lineWidth = 1.5;
  c.beginPath();
  for (let k = 0; k + 1 < path.length; k++) {
    const from = path[k], to = path[k + 1];
    if (laneOf[from] === laneOf[to] || end[from] < chart.t0 || start[to] > chart.t1) continue;
    const left = Math.round(chart.x(end[from])), right = Math.round(chart.x(start[to]));
    const key = `${left} ${right} ${laneOf[from]} ${laneOf[to]}`;
    if (drawn.has(key)) continue;
    drawn.add(key);
    curve(chart, c, from, to);
  }
  c.stroke();
}

function outline(chart, c, i, colour, width) {
  const row = chart.rowOfLane[chart.timeline.laneOf[i]];
  if (!row) return;
  const left = chart.x(chart.timeline.start[i]), right = chart.x(chart.timeline.end[i]);
  if (right < GUTTER - 9 || left > chart.width + 9) return;
  const x = Math.max(left, GUTTER - 9), w = Math.max(Math.min(right, chart.width + 9) - x - 1, 2);
  c.lineWidth = width;
  c.strokeStyle = colour;
  c.beginPath();
  c.roundRect(x - 0.5, row.y - chart.scroll - 0.5, w + 1, row.height + 1, 3);
  c.stroke();
}
