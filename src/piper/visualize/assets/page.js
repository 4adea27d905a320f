// The page: selection, search, keys.

const MOST_WAITS = 30; // how many a list shows before one asks for all
const PRINT_TURNS = 200; // how often a chart is drawn at most until all texts are there

class Page {
  constructor(data) {
    this.data = data;
    this.options = { communication: true, memory: true, critical: false, equal: false };
    this.selection = null; // { chart, box, counterpart, relations }
    this.found = null; // per chart, the boxes that the search found
    this.cursor = null; // time under the mouse
    this.range = null; // times between which the axis is being dragged
    this.printing = false;
    this.timelines = data.timelines.map((raw) => new Timeline(raw));
    const untils = this.timelines.map((t) => t.until);
    this.view = new View(this.timelines[0].from, Math.max(...untils), () => this.invalidate());
    this.charts = this.timelines.map((timeline, i) => new Chart(this, timeline, i));
    byId("charts").append(...this.charts.map((chart) => chart.root));
    this.#theme(stored("theme"));
    this.#parts();
    new Tables(this).fill();
    this.#legend();
    this.#listen();
    this.select(null);
    this.resize();
  }

  // ------------------------------------------------------------------ drawing

  /** Draw everything again in the next frame. */
  invalidate() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = undefined;
      const begin = performance.now();
      for (const chart of this.charts) chart.draw();
      this.frameMilliseconds = performance.now() - begin;
    });
  }

  /** Paper shows all rows, dark on light; it is drawn at once, since no frame follows. */
  print(begins) {
    this.printing = begins;
    this.#theme(begins ? "light" : stored("theme"));
    this.#refresh();
    this.resize();
    for (const chart of this.charts) for (let turn = 0; turn < PRINT_TURNS && !chart.draw(); turn++);
  }

  /** The same, where boxes may have other colours. */
  recolour() {
    for (const chart of this.charts) chart.shade();
    this.invalidate();
  }

  resize() {
    for (const chart of this.charts) chart.resize();
    this.invalidate();
  }

  #theme(wanted) {
    const dark = wanted ? wanted === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.dark = dark;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this.palette = new Palette(dark);
    for (const chart of this.charts) chart.overview.picture = null;
  }

  toggleTheme() {
    store("theme", this.dark ? "light" : "dark");
    this.#theme(this.dark ? "light" : "dark");
    this.#refresh();
  }

  toggle(option) {
    this.options[option] = !this.options[option];
    byId(option).setAttribute("aria-pressed", this.options[option]);
    this.recolour();
    this.resize();
  }

  #refresh() {
    new Tables(this).fill();
    this.#legend();
    this.#selected();
    this.recolour();
  }

  // ------------------------------------------------------------------ selection

  /** Select a box of a chart, or nothing. */
  select(chart, box = -1, { show = false } = {}) {
    for (const each of this.charts) each.marks.fill(MARK.none);
    this.selection = chart && box >= 0 ? { chart, box, counterpart: -1, relations: relations(chart.timeline, box) } : null;
    if (this.selection) {
      this.#mark(chart, box);
      for (const other of this.charts) {
        if (other === chart) continue;
        this.selection.counterpart = other.timeline.counterpart(chart.timeline, box);
        if (this.selection.counterpart >= 0) this.#mark(other, this.selection.counterpart);
      }
      if (show) this.#bringIntoView(chart, box);
    }
    this.#selected();
    this.recolour();
  }

  #mark({ timeline, marks }, box) {
    for (const i of timeline.chain(box)) marks[i] = MARK.chain;
    for (const i of [...timeline.before(box), ...timeline.after(box), ...timeline.meets(box)]) marks[i] = MARK.direct;
    marks[box] = MARK.self;
  }

  #bringIntoView(chart, box) {
    const { start, end } = chart.timeline, { view } = this;
    chart.reveal(box);
    if (this.selection?.counterpart >= 0) {
      for (const other of this.charts) if (other !== chart) other.reveal(this.selection.counterpart);
    }
    if (end[box] <= chart.t0 || start[box] >= chart.t1) {
      const middle = (start[box] + end[box]) / 2 * chart.factor;
      view.glide(middle - view.length / 2, middle + view.length / 2);
    }
  }

  zoomTo(chart, box) {
    const { timeline: t, factor } = chart;
    const margin = Math.max(4 * (t.end[box] - t.start[box]), 1e-8);
    this.view.glide((t.start[box] - margin) * factor, (t.end[box] + margin) * factor);
  }

  /** Select the next box in a direction. */
  step(key) {
    const chart = this.selection?.chart ?? this.#focused();
    const t = chart.timeline;
    if (!this.selection) {
      const row = chart.rows.find((r) => r.lane && r.lane.first < r.lane.last && r.y >= chart.scroll + AXIS);
      if (row) this.select(chart, Math.min(t.firstEndingAfter(row.lane, chart.t0), row.lane.last - 1), { show: true });
      return;
    }
    const { box } = this.selection, lane = t.lane(box);
    if (key === "ArrowLeft" && box > lane.first) this.select(chart, box - 1, { show: true });
    if (key === "ArrowRight" && box + 1 < lane.last) this.select(chart, box + 1, { show: true });
    if (key === "ArrowUp" || key === "ArrowDown") {
      const rows = chart.rows.filter((r) => r.lane && r.lane.first < r.lane.last);
      const at = rows.findIndex((r) => r.lane === lane);
      const row = rows[at + (key === "ArrowUp" ? -1 : 1)];
      if (row) this.select(chart, nearest(t, row.lane, (t.start[box] + t.end[box]) / 2), { show: true });
    }
  }

  follow(direction) {
    if (!this.selection) return;
    const { chart, box } = this.selection;
    const [next] = inOrder(chart.timeline, box, direction);
    if (next !== undefined) this.select(chart, next, { show: true });
  }

  #focused() {
    return this.charts.find((chart) => chart.rowsElement === document.activeElement) ?? this.charts[0];
  }

  clear() {
    byId("search").value = "";
    this.search("");
    this.select(null);
  }

  // ------------------------------------------------------------------ search

  search(query) {
    const found = this.timelines.map((timeline) => timeline.find(query));
    this.found = found[0] === null ? null : found.map((list) => new Set(list));
    this.hits = found[0] === null ? [] : found.flatMap((list, i) => list.map((box) => ({ chart: this.charts[i], box })));
    this.hit = -1;
    byId("matches").textContent = this.found ? `${this.hits.length} found` : "";
    this.recolour();
  }

  nextHit(by) {
    if (!this.hits?.length) return;
    this.hit = this.hit < 0 && by < 0 ? this.hits.length - 1 : (this.hit + by + this.hits.length) % this.hits.length;
    const { chart, box } = this.hits[this.hit];
    byId("matches").textContent = `${this.hit + 1} of ${this.hits.length}`;
    this.select(chart, box, { show: true });
  }

  // ------------------------------------------------------------------ words

  /** What there is to say about a box, as pairs of a name and a text. */
  facts({ timeline: t }, i) {
    const length = t.end[i] - t.start[i], lane = t.lane(i);
    const idle = t.start[i] - (i > lane.first ? t.reach[i - 1] : t.from);
    const others = (t.members.get(t.meeting[i]) ?? []).filter((j) => j !== i).map((j) => t.device(j).device);
    const rate = length > 0 ? t.nbytes[i] / length : 0;
    const flops = length > 0 ? t.flops[i] / length : 0;
    return [
      ["duration", seconds(length)],
      ["from, to", `${seconds(t.start[i], t.end[i])} – ${seconds(t.end[i])}`],
      ["node", t.node[i] < 0 ? "none" : `#${t.node[i]}`],
      ["device", `${t.device(i).device}${more(t.device(i).stands_for)}, ${lane.stream}`],
      ["operation", t.strings[t.op[i]]],
      ["pass", t.strings[t.pass[i]] && PASSES[t.passOf[i]].meaning],
      ["region", t.strings[t.region[i]]],
      ["microbatch", t.microbatch[i] >= 0 ? String(t.microbatch[i]) : ""],
      ["with", others.length ? `device ${list(others)}` : ""],
      ["bytes", t.nbytes[i] > 0 ? bytes(t.nbytes[i]) + (t.isMessage(i) && rate && timeUnit === "s" ? `, ${bytes(rate)}/s` : "") : ""],
      ["FLOPs", t.flops[i] > 0 ? count(t.flops[i]) + (flops && timeUnit === "s" ? `, ${count(flops)}FLOP/s` : "") : ""],
      ["idle before", idle > 1e-9 ? seconds(idle) : ""],
      ["critical path", t.critical[i] ? "yes" : ""],
    ].filter(([, text]) => text);
  }

  #factList(chart, box) {
    return make("dl", { class: "facts" }, ...this.facts(chart, box).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  }

  #name({ timeline: t }, i) {
    return make("div", { class: "name" }, this.#swatch(boxColour(t.passOf[i], t.odd[i], t.isMessage(i), false)), t.text(i));
  }

  #swatch(colour) { return make("span", { class: "swatch", style: `background: ${this.palette.css[colour]}` }); }

  #selected() {
    const target = byId("selected");
    if (!this.selection) {
      target.replaceChildren(make("p", { class: "hint" }, "Click a box, or use the arrow keys, to see what it waits for and what waits for it."));
      byId("spoken").textContent = "";
      return;
    }
    const { chart, box, counterpart } = this.selection, t = chart.timeline;
    target.replaceChildren(
      this.#name(chart, box),
      this.#factList(chart, box),
      ...this.#compared(chart, box, counterpart),
      ...this.#waits("Waits for", chart, box, "before", t.away[box]),
      ...this.#waits("Waits for it", chart, box, "after", 0),
    );
    byId("spoken").textContent =
      `${t.text(box)}, ${this.facts(chart, box).map(([name, text]) => `${name} ${text}`).join(", ")}`;
  }

  #compared(chart, box, counterpart) {
    if (this.charts.length < 2) return [];
    const other = this.charts.find((each) => each !== chart).timeline;
    if (counterpart < 0) return [make("h3", {}, other.name), make("p", { class: "hint" }, "has no such box")];
    const mine = chart.timeline.end[box] - chart.timeline.start[box];
    const theirs = other.end[counterpart] - other.start[counterpart];
    return [
      make("h3", {}, `In ${other.name}`),
      make("dl", { class: "facts" },
        make("dt", {}, "duration"), make("dd", {}, seconds(theirs), mine > 0 ? ` (${signed(theirs / mine - 1)})` : ""),
        make("dt", {}, "from, to"), make("dd", {}, `${seconds(other.start[counterpart], other.end[counterpart])} – ${seconds(other.end[counterpart])}`)),
    ];
  }

  /** A list of what box waits for, or what waits for it; the rest of a long one is shown when asked for. */
  #waits(title, chart, box, direction, away) {
    const t = chart.timeline, boxes = inOrder(t, box, direction);
    if (!boxes.length && !away) return [];
    const item = (i) => make("li", {}, make("button", { onclick: () => this.select(chart, i, { show: true }) },
      this.#swatch(boxColour(t.passOf[i], t.odd[i], t.isMessage(i), false)),
      make("span", {}, t.text(i)),
      direction === "before" ? binding(t.binds(i, box), "It started when this ended") : binding(t.binds(box, i), "This started when it ended"),
      make("span", { class: "soft" }, `device ${t.device(i).device}`)));
    const items = boxes.slice(0, MOST_WAITS).map(item), left = boxes.slice(MOST_WAITS);
    if (left.length) {
      const rest = make("li", {}, make("button", { class: "soft", onclick: () => rest.replaceWith(...left.map(item)) }, `and ${left.length} more`));
      items.push(rest);
    }
    if (away) items.push(make("li", { class: "hint" }, `${away} in an earlier part`));
    return [make("h3", {}, title), make("ul", { class: "waits" }, ...items)];
  }

  // ------------------------------------------------------------------ around the charts

  #legend() {
    const used = new Set(this.timelines.flatMap((t) => [...new Set(t.passOf)]));
    const entry = (colour, text) => make("span", {}, make("i", { class: "swatch", style: `background: ${colour}` }), text);
    const categories = new Map();
    for (const t of this.timelines) {
      for (const d of t.devices) d.memory.categories.forEach(({ name }, i) => categories.set(name, this.palette.memory(name, i)));
    }
    const css = (pass, message) => this.palette.css[boxColour(pass, false, message, false)];
    byId("legend").replaceChildren(
      ...PASSES.map((pass, i) => (used.has(i) ? entry(css(i, false), pass.meaning) : null)).filter(Boolean),
      ...(this.timelines.some((t) => t.members.size) ? [make("span", {}, make("i", { class: "swatch", style: `background: linear-gradient(135deg, ${css(0, true)} 50%, ${css(1, true)} 50%)` }), "communication (pale)")] : []),
      ...(this.timelines.some((t) => t.critical.includes(1)) ? [make("span", {}, make("i", { class: "swatch", style: "height: 3px; background: var(--critical)" }), "on the critical path")] : []),
      ...(this.timelines.some((t) => t.odd.includes(1)) ? [make("span", {}, "darker: every second stage of a device")] : []),
      ...(categories.size ? [make("span", {}, make("b", {}, "memory:"))] : []),
      ...[...categories].map(([name, colour]) => entry(colour, name)),
    );
  }

  #parts() {
    const { parts, part } = this.data;
    if (parts.length < 2) return;
    const nav = byId("parts");
    nav.hidden = false;
    nav.append(`Too large for one page: part ${part + 1} of ${parts.length}. `);
    parts.forEach((file, i) => nav.append(i === part ? make("b", {}, String(i + 1)) : make("a", { href: file }, String(i + 1)), " "));
  }

  // ------------------------------------------------------------------ events

  #listen() {
    new ResizeObserver(() => this.printing || this.resize()).observe(byId("charts"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      if (!stored("theme")) { this.#theme(null); this.#refresh(); }
    });
    byId("equal").hidden = this.charts.length < 2 || this.data.parts.length > 1;
    for (const option of Object.keys(this.options)) byId(option).addEventListener("click", () => this.toggle(option));
    const { view } = this;
    byId("zoom-in").addEventListener("click", () => view.glide(...view.zoomed(2)));
    byId("zoom-out").addEventListener("click", () => view.glide(...view.zoomed(0.5)));
    byId("fit").addEventListener("click", () => view.glide(view.from, view.latest));
    byId("theme").addEventListener("click", () => this.toggleTheme());
    byId("help-button").addEventListener("click", () => byId("help").showModal());
    const field = byId("search");
    field.addEventListener("input", () => this.search(field.value));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.nextHit(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") { this.clear(); this.charts[0].rowsElement.focus(); }
    });
    document.addEventListener("keydown", (event) => this.#key(event));
    for (const chart of this.charts) new Mouse(this, chart);
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
  }

  #key(event) {
    if (event.target.matches("input, dialog *") || byId("help").open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" && event.target.closest("button, a")) return;
    const { view } = this;
    const actions = {
      "+": () => view.glide(...view.zoomed(2)), "=": () => view.glide(...view.zoomed(2)), w: () => view.glide(...view.zoomed(2)),
      "-": () => view.glide(...view.zoomed(0.5)), s: () => view.glide(...view.zoomed(0.5)),
      0: () => view.glide(view.from, view.latest),
      a: () => view.glide(...view.shifted(-0.2)), d: () => view.glide(...view.shifted(0.2)),
      c: () => this.toggle("critical"), l: () => byId("equal").hidden || this.toggle("equal"), o: () => this.toggle("communication"), m: () => this.toggle("memory"),
      t: () => this.toggleTheme(), "?": () => byId("help").showModal(), "/": () => byId("search").focus(),
      "[": () => this.follow("before"), "]": () => this.follow("after"),
      Escape: () => this.clear(),
      Enter: () => this.selection && this.zoomTo(this.selection.chart, this.selection.box),
    };
    for (const key of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"]) actions[key] = () => this.step(key);
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  /** Show what is under the mouse, or hide it. */
  tip(x, y, ...content) {
    const tip = byId("tooltip");
    tip.hidden = content.length === 0;
    if (tip.hidden) return;
    tip.replaceChildren(...content);
    const { offsetWidth: w, offsetHeight: h } = tip;
    tip.style.left = `${x + 16 + w > innerWidth ? Math.max(4, x - w - 12) : x + 16}px`;
    tip.style.top = `${y + 18 + h > innerHeight ? Math.max(4, y - h - 12) : y + 18}px`;
  }

  boxTip(chart, box) {
    const t = chart.timeline, before = t.before(box).filter((i) => t.binds(i, box));
    const waits = before.length ? before.slice(0, 3).map((i) => t.text(i)).join(", ") + (before.length > 3 ? ", …" : "") : "";
    const list = this.#factList(chart, box);
    if (waits) list.append(make("dt", {}, "waits for"), make("dd", {}, waits));
    return [this.#name(chart, box), list];
  }

  memoryTip({ row, i }) {
    const { times, categories, total } = row.memory;
    const lines = [...categories].reverse().map(({ name, nbytes }) => [name, nbytes[i]]).filter(([, v]) => v > 0);
    return [
      make("div", { class: "name" }, `memory of device ${row.device.device}`),
      make("dl", { class: "facts" },
        ...[["all", total[i]], ...lines].flatMap(([name, v]) => [make("dt", {}, name), make("dd", {}, bytes(v))]),
        make("dt", {}, "since"), make("dd", {}, seconds(times[i]))),
    ];
  }
}

/** What box waits for (`before`) or what waits for it (`after`): first where the end of one let the other start, then those closest in time. */
function inOrder(t, box, direction) {
  const before = direction === "before";
  const rank = (i) => (before ? [t.binds(i, box), -t.end[i]] : [t.binds(box, i), t.start[i]]);
  return t[direction](box).map((i) => [i, ...rank(i)]).sort((a, b) => b[1] - a[1] || a[2] - b[2] || a[0] - b[0]).map(([i]) => i);
}

function binding(is, title) { return is ? make("span", { class: "badge", title }, "binding") : null; }

/** The box of a lane that runs at `time`, or else the one that is closest. */
function nearest(t, lane, time) {
  const next = Math.min(t.firstEndingAfter(lane, time), lane.last - 1);
  if (next === lane.first || t.start[next] <= time) return next;
  return time - t.end[next - 1] <= t.start[next] - time ? next - 1 : next;
}

function signed(share) { return `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(1)} %`; }

/** What to add to the number of a device that stands for others too. */
function more({ count: n, text }) { return n > 1 ? ` (stands for ${n}: ${text})` : ""; }

function list(numbers) {
  const all = [...new Set(numbers)].sort((a, b) => a - b);
  return all.length > 6 ? `${all.slice(0, 5).join(", ")}, … (${all.length})` : all.join(", ");
}

// For scripts and for curious people at the console.
window.piperPage = new Page(DATA);
