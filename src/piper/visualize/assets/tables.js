// The tables beside the charts.

class Tables {
  constructor(page) { this.page = page; }

  /** Fills all tables; one without rows is hidden. */
  fill() {
    const tables = { totals: this.#totals(), improve: this.#improve(), devices: this.#devices(), kinds: this.#kinds() };
    for (const [id, rows] of Object.entries(tables)) {
      byId(id).replaceChildren(...rows);
      byId(id).closest("section").hidden = rows.length === 0;
    }
    byId("improve-title").textContent =
      `Critical path${this.page.timelines.length > 1 ? " above" : ""}: what to improve first`;
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
      ["HFU (recomputation counted)", (t) => t.hfu, percent, false],
      ["FLOPs", (t) => t.flopsTotal || null, count, null],
      ["devices", (t) => t.numDevices, String, null],
      ["clocks agree to", (t) => t.clockError || null, seconds, null],
    ];
    const rows = measures
      .map(([name, get, text, lowIsGood]) => {
        const values = this.page.timelines.map(get);
        if (values.every((v) => v === null)) return null;
        const cells = values.map((v) => (v === null ? "–" : text(v)));
        if (values.length > 1) cells.push(difference(values, lowIsGood));
        return [name, ...cells];
      })
      .filter(Boolean);
    const head = this.page.timelines.length > 1 ? [this.#head("", "above", "below", "change")] : [];
    return [...head, this.#body(rows)];
  }

  /** The critical path by kind of work, the longest first. */
  #improve() {
    const t = this.page.timelines[0];
    const kinds = sums(t, (i) => kind(t, i));
    if (!kinds.length) return [];
    // Many stages: first without their regions, since each alone is little.
    const passes = kinds.length > 8 ? sums(t, (i) => kind(t, i).replace(/ \S+=\d+/g, "")) : [];
    const body = (entries) => make("tbody", {}, ...entries.map(({ name, first, boxes, length }) => {
      const share = length / t.seconds;
      const go = () => this.page.select(this.page.charts[0], first, { show: true });
      return make("tr", { class: "link", style: `--share: ${100 * share}%`, onclick: go },
        make("td", {}, make("button", {}, name)),
        make("td", { class: "number" }, `${boxes} ×`),
        make("td", { class: "number" }, seconds(length)),
        make("td", { class: "number" }, percent(share)));
    }));
    return [...(passes.length ? [body(passes.slice(0, 6))] : []), body(kinds.slice(0, 8))];
  }

  #devices() {
    const [first] = this.page.timelines;
    const cell = (number, text) => {
      const parts = this.page.timelines.map((t) => t.devices.find((d) => d.device === number)).map((d) => (d ? text(d) : "–"));
      return make("span", {}, ...parts.flatMap((part, i) => (i ? [make("br"), make("span", { class: "hint" }, part)] : [part])));
    };
    const rows = first.devices.map((d) => [
      make("span", { title: `devices ${d.stands_for.text}` }, `${d.device}${d.stands_for.count > 1 ? ` +${d.stands_for.count - 1}` : ""}`),
      cell(d.device, (x) => seconds(x.busy)),
      cell(d.device, (x) => percent(x.bubble)),
      cell(d.device, (x) => seconds(x.exposed)),
      cell(d.device, (x) => (x.peak ? bytes(x.peak) : "–")),
    ]);
    return [this.#head("device", "busy", "bubble", "exposed", "peak"), this.#body(rows)];
  }

  /** Seconds and bytes of everything, by pass and operation. */
  #kinds() {
    const totals = this.page.timelines.map((t) => {
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
}

function difference([a, b], lowIsGood) {
  if (a === null || b === null || a === b) return "";
  if (a === 0) return "";
  const change = b / a - 1;
  const tone = lowIsGood === null || Math.abs(change) < 5e-4 ? null : (change < 0) === lowIsGood ? "better" : "worse";
  return make("span", { class: tone }, signed(change));
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
