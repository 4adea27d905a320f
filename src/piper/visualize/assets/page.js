// The page: selection, search, keys, tables.

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; text is never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

class Page {
  constructor(data) {
    this.data = data;
    this.options = { communication: true, memory: true, critical: false, equal: false };
    this.selection = null; // { chart, box, counterpart }
    this.found = null; // per chart, the boxes that the search found
    this.cursor = null; // time under the mouse
    this.range = null; // times between which the axis is being dragged
    this.timelines = data.timelines.map((raw) => new Timeline(raw));
    const untils = this.timelines.map((t) => t.until);
    this.view = new View(this.timelines[0].from, Math.max(...untils), () => this.invalidate());
    this.charts = this.timelines.map((timeline, i) => new Chart(this, timeline, i));
    byId("charts").append(...this.charts.map((chart) => chart.root));
    this.#theme(stored("theme"));
    this.#parts();
    this.#tables();
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

  resize() {
    for (const chart of this.charts) chart.resize();
    this.invalidate();
  }

  #theme(wanted) {
    const dark = wanted ? wanted === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.dark = dark;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this.palette = new Palette(dark);
    for (const chart of this.charts) chart.overviewPicture = null;
  }

  toggleTheme() {
    store("theme", this.dark ? "light" : "dark");
    this.#theme(this.dark ? "light" : "dark");
    this.#refresh();
  }

  toggle(option) {
    this.options[option] = !this.options[option];
    byId(option).setAttribute("aria-pressed", this.options[option]);
    this.resize();
  }

  #refresh() {
    this.#tables();
    this.#legend();
    this.#selected();
    this.invalidate();
  }

  // ------------------------------------------------------------------ selection

  /** Select a box of a chart, or nothing. */
  select(chart, box = -1, { show = false } = {}) {
    for (const each of this.charts) each.marks.fill(MARK.none);
    this.selection = chart && box >= 0 ? { chart, box, counterpart: -1 } : null;
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
    this.invalidate();
  }

  #mark({ timeline, marks }, box) {
    for (const step of [timeline.before, timeline.after]) {
      for (const i of timeline.closure(box, step)) marks[i] = MARK.chain;
    }
    for (const i of [...timeline.before(box), ...timeline.after(box)]) marks[i] = MARK.direct;
    for (const i of timeline.members.get(timeline.meeting[box]) ?? []) marks[i] = MARK.direct;
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
    const [next] = chart.timeline[direction](box);
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
    this.invalidate();
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
      ...this.#waits("Waits for", chart, [...t.before(box)], t.away[box]),
      ...this.#waits("Waits for it", chart, [...t.after(box)], 0),
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

  #waits(title, chart, boxes, away) {
    if (!boxes.length && !away) return [];
    const t = chart.timeline;
    const items = boxes.slice(0, 30).map((i) => make("li", {}, make("button", { onclick: () => this.select(chart, i, { show: true }) },
      this.#swatch(boxColour(t.passOf[i], t.odd[i], t.isMessage(i), false)),
      make("span", {}, t.text(i)),
      make("span", { class: "soft" }, `device ${t.device(i).device}`))));
    const left = boxes.length - items.length;
    if (left > 0) items.push(make("li", { class: "hint" }, `and ${left} more`));
    if (away) items.push(make("li", { class: "hint" }, `${away} in an earlier part`));
    return [make("h3", {}, title), make("ul", { class: "waits" }, ...items)];
  }

  // ------------------------------------------------------------------ tables

  #tables() {
    const tables = { totals: this.#totals(), improve: this.#improve(), devices: this.#devices(), kinds: this.#kinds() };
    for (const [id, rows] of Object.entries(tables)) {
      byId(id).replaceChildren(...rows);
      byId(id).closest("section").hidden = rows.length === 0;
    }
  }

  #head(...names) {
    return make("thead", {}, make("tr", {}, ...names.map((name, i) => make("th", { scope: "col", class: i ? "number" : null }, name))));
  }

  /** Rows of numbers; a cell is a text or an element. */
  #body(rows) {
    return make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, i) => make("td", { class: i ? "number" : null }, cell)))));
  }

  #totals() {
    const peak = (t) => t.devices.reduce((a, d) => Math.max(a, d.peak), 0);
    const measures = [
      ["step time", (t) => t.seconds, seconds, true],
      ["bubble", (t) => t.bubble, percent, true],
      ["exposed communication", (t) => t.exposed, seconds, true],
      ["most memory", (t) => peak(t) || null, bytes, true],
      ["MFU", (t) => t.mfu, percent, false],
      ["FLOPs", (t) => t.flopsTotal || null, count, null],
      ["devices", (t) => t.numDevices, String, null],
      ["clocks agree to", (t) => t.clockError || null, seconds, null],
    ];
    const rows = measures
      .map(([name, get, text, lowIsGood]) => {
        const values = this.timelines.map(get);
        if (values.every((v) => v === null)) return null;
        const cells = values.map((v) => (v === null ? "–" : text(v)));
        if (values.length > 1) cells.push(difference(values, lowIsGood));
        return [name, ...cells];
      })
      .filter(Boolean);
    const head = this.timelines.length > 1 ? [this.#head("", "above", "below", "change")] : [];
    return [...head, this.#body(rows)];
  }

  /** The critical path by kind of work, the longest first. */
  #improve() {
    const t = this.timelines[0];
    const kinds = sums(t, (i) => kind(t, i));
    if (!kinds.length) return [];
    // Many stages: first without their regions, since each alone is little.
    const passes = kinds.length > 8 ? sums(t, (i) => kind(t, i).replace(/ \S+=\d+/g, "")) : [];
    const body = (entries) => make("tbody", {}, ...entries.map(({ name, first, boxes, length }) => {
      const share = length / t.seconds;
      const go = () => this.select(this.charts[0], first, { show: true });
      return make("tr", { class: "link", style: `--share: ${100 * share}%`, onclick: go },
        make("td", {}, make("button", {}, name)),
        make("td", { class: "number" }, `${boxes} ×`),
        make("td", { class: "number" }, seconds(length)),
        make("td", { class: "number" }, percent(share)));
    }));
    return [...(passes.length ? [body(passes.slice(0, 6))] : []), body(kinds.slice(0, 8))];
  }

  #devices() {
    const [first] = this.timelines;
    const cell = (number, text) => {
      const parts = this.timelines.map((t) => t.devices.find((d) => d.device === number)).map((d) => (d ? text(d) : "–"));
      return make("span", {}, ...parts.flatMap((part, i) => (i ? [make("br"), make("span", { class: "hint" }, part)] : [part])));
    };
    const rows = first.devices.map((d) => [
      `${d.device}${more(d.stands_for)}`,
      cell(d.device, (x) => seconds(x.busy)),
      cell(d.device, (x) => percent(x.bubble)),
      cell(d.device, (x) => seconds(x.exposed)),
      cell(d.device, (x) => (x.peak ? bytes(x.peak) : "–")),
    ]);
    return [this.#head("device", "busy", "bubble", "exposed", "peak"), this.#body(rows)];
  }

  /** Seconds and bytes of everything, by pass and operation. */
  #kinds() {
    const totals = this.timelines.map((t) => {
      const found = new Map();
      for (let i = 0; i < t.n; i++) {
        const name = `${t.strings[t.op[i]]}${t.strings[t.pass[i]] ? ` ${t.strings[t.pass[i]]}` : ""}`;
        const weight = t.device(i).stands_for.count;
        const entry = found.get(name) ?? { seconds: 0, bytes: 0, boxes: 0 };
        entry.boxes += weight;
        entry.seconds += weight * (t.end[i] - t.start[i]);
        entry.bytes += t.isMessage(i) ? weight * t.nbytes[i] : 0;
        found.set(name, entry);
      }
      return found;
    });
    const names = [...new Set(totals.flatMap((found) => [...found.keys()]))]
      .sort((a, b) => (totals[0].get(b)?.seconds ?? 0) - (totals[0].get(a)?.seconds ?? 0));
    const text = (entry, of) => (entry ? of(entry) : "–");
    const rows = names.map((name) => [
      name,
      ...totals.map((found) => text(found.get(name), (e) => seconds(e.seconds))),
      ...(totals.length > 1 ? [] : [text(totals[0].get(name), (e) => String(e.boxes))]),
      text(totals[0].get(name), (e) => (e.bytes ? bytes(e.bytes) : "")),
    ]);
    return [this.#head("", ...(totals.length > 1 ? ["above", "below"] : ["time", "boxes"]), "bytes"), this.#body(rows)];
  }

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
      make("span", {}, make("i", { class: "swatch", style: `background: linear-gradient(135deg, ${css(0, true)} 50%, ${css(1, true)} 50%)` }), "communication (pale)"),
      make("span", {}, make("i", { class: "swatch", style: "height: 3px; background: var(--critical)" }), "on the critical path"),
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
    new ResizeObserver(() => this.resize()).observe(byId("charts"));
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
    const t = chart.timeline, before = t.before(box);
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

/** The mouse over one chart. */
class Mouse {
  constructor(page, chart) {
    Object.assign(this, { page, chart, drag: null });
    const { canvas, rowsElement, overview } = chart;
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
    const { chart, page } = this, { view } = page;
    const a = chart.overviewX(view.t0), b = chart.overviewX(view.t1), x = event.offsetX;
    chart.overview.setPointerCapture(event.pointerId);
    chart.overview.classList.add("dragging");
    if (Math.abs(x - a) < 6) this.held = { edge: "left" };
    else if (Math.abs(x - b) < 6) this.held = { edge: "right" };
    else {
      if (x < a || x > b) {
        const middle = chart.overviewTime(x);
        view.show(middle - view.length / 2, middle + view.length / 2);
      }
      this.held = { grip: chart.overviewTime(x) - view.t0 };
    }
  }

  #pull(event) {
    if (!this.held) return;
    const { view } = this.page, time = this.chart.overviewTime(event.offsetX);
    if (this.held.edge === "left") view.show(Math.min(time, view.t1), view.t1);
    else if (this.held.edge === "right") view.show(view.t0, Math.max(time, view.t0));
    else view.show(time - this.held.grip, time - this.held.grip + view.length);
  }
}

/** The box of a lane that runs at `time`, or else the one that is closest. */
function nearest(t, lane, time) {
  const next = Math.min(t.firstEndingAfter(lane, time), lane.last - 1);
  if (next === lane.first || t.start[next] <= time) return next;
  return time - t.end[next - 1] <= t.start[next] - time ? next - 1 : next;
}

/** The boxes of the critical path by name, the longest sum first. */
function sums(t, nameOf) {
  const found = new Map();
  for (const i of t.path) {
    const name = nameOf(i);
    const entry = found.get(name) ?? { name, first: i, boxes: 0, length: 0 };
    entry.boxes++;
    entry.length += t.end[i] - t.start[i];
    found.set(name, entry);
  }
  return [...found.values()].sort((a, b) => b.length - a.length);
}

/** What a box is, whatever its microbatch: "F PP=1". */
function kind(t, i) {
  const words = t.text(i).split(" ");
  const split = words.length > 1 && t.microbatch[i] >= 0 ? words.findLastIndex((w) => w.endsWith(`=${t.microbatch[i]}`)) : -1;
  return words.filter((_, k) => k !== split).join(" ");
}

function difference([a, b], lowIsGood) {
  if (a === null || b === null || a === b) return "";
  if (a === 0) return "";
  const change = b / a - 1;
  const tone = lowIsGood === null || Math.abs(change) < 5e-4 ? null : (change < 0) === lowIsGood ? "better" : "worse";
  return make("span", { class: tone }, signed(change));
}

function signed(share) { return `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(1)} %`; }

/** " (+3: 4, 8, 12)" for a device that stands for others too. */
function more({ count: n, text }) { return n > 1 ? ` (stands for ${n}: ${text})` : ""; }

function list(numbers) {
  const all = [...new Set(numbers)].sort((a, b) => a - b);
  return all.length > 6 ? `${all.slice(0, 5).join(", ")}, … (${all.length})` : all.join(", ");
}

// A page from a file may have no storage; then a choice lasts as long as the page.
function stored(name) { try { return localStorage.getItem(`piper-${name}`); } catch { return null; } }
function store(name, value) { try { localStorage.setItem(`piper-${name}`, value); } catch { /* see above */ } }

// For scripts and for curious people at the console.
window.piperPage = new Page(DATA);
