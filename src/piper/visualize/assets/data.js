// A timeline as typed arrays. Boxes are numbered 0..n-1, stream by stream, in order of their start.

class Timeline {
  /** `raw` is what piper.visualize.page_data writes: times in nanoseconds, strings numbered. */
  constructor(raw) {
    const { boxes, strings } = raw;
    const n = boxes.length.length;
    Object.assign(this, {
      n, name: raw.name, source: raw.source, seconds: raw.seconds, from: raw.from, until: raw.until,
      bubble: raw.bubble, exposed: raw.exposed, mfu: raw.mfu, hfu: raw.hfu, flopsTotal: raw.flops, numDevices: raw.num_devices, clockError: raw.clock_error,
      strings, path: raw.critical_path,
    });
    this.start = new Float64Array(n);
    this.end = new Float64Array(n);
    this.reach = new Float64Array(n); // the latest end so far on the stream: messages may overlap
    this.laneOf = new Int32Array(n);
    for (const [name, Type] of [
      ["node", Int32Array], ["label", Int32Array], ["region", Int32Array], ["op", Int32Array], ["pass", Int32Array],
      ["microbatch", Int32Array], ["odd", Uint8Array], ["critical", Uint8Array], ["meeting", Int32Array],
      ["nbytes", Float64Array], ["flops", Float64Array], ["away", Int32Array],
    ]) this[name] = Type.from(boxes[name]);
    this.passOf = this.pass.map((s) => PASS_INDEX.get(strings[s]) ?? PASSES.length - 1);
    this.devices = [];
    this.lanes = [];
    let first = 0;
    for (const device of raw.devices) {
      const lanes = device.lanes.map(({ stream, count: length }) => {
        const lane = { number: this.lanes.length, stream, first, last: first + length, device: this.devices.length };
        this.#times(lane, boxes);
        lane.criticals = []; // its boxes on the critical path
        for (let i = lane.first; i < lane.last; i++) if (this.critical[i]) lane.criticals.push(i);
        lane.computes = stream === "compute" || this.#any(lane, (i) => this.meeting[i] < 0);
        this.lanes.push(lane);
        first += length;
        return lane;
      });
      this.devices.push({ ...device, number: this.devices.length, lanes, memory: memoryCurve(device.memory) });
    }
    this.#waits(boxes.waits, boxes.bound);
    this.members = new Map(); // meeting -> boxes
    for (let i = 0; i < n; i++) {
      if (this.meeting[i] < 0) continue;
      if (!this.members.has(this.meeting[i])) this.members.set(this.meeting[i], []);
      this.members.get(this.meeting[i]).push(i);
    }
  }

  #times(lane, boxes) {
    let now = 0, reach = 0; // in nanoseconds: sums of whole numbers are exact
    for (let i = lane.first; i < lane.last; i++) {
      const start = now + boxes.gap[i];
      now = start + boxes.length[i];
      this.start[i] = start * 1e-9;
      this.end[i] = now * 1e-9;
      this.reach[i] = reach = Math.max(reach, this.end[i]);
      this.laneOf[i] = lane.number;
    }
  }

  #any(lane, holds) {
    for (let i = lane.first; i < lane.last; i++) if (holds(i)) return true;
    return false;
  }

  /** `waits[i]`: the boxes whose end box i needed, the first `bound[i]` of them those whose end let it start. */
  #waits(waits, bound) {
    this.waits = waits;
    this.bound = bound;
    this.followers = reversed(waits, this.n);
    this.effects = reversed(waits.map((list, i) => list.slice(0, bound[i])), this.n);
  }

  /** The boxes that meet box i in a message or collective, itself too. */
  meets(i) { return this.members.get(this.meeting[i]) ?? [i]; }

  /** All boxes that must end before box i starts: what it needs itself, and what those that it meets need. */
  before(i) {
    const met = this.meets(i);
    return [...new Set(met.flatMap((m) => this.waits[m]))].filter((j) => !met.includes(j));
  }

  /** All boxes that cannot start before box i ends. */
  after(i) {
    const met = this.meets(i);
    return [...new Set([...this.followers(i)].flatMap((j) => this.meets(j)))].filter((j) => !met.includes(j));
  }

  /** Whether the end of box j was what box i, or one that it meets, waited for last. */
  binds(j, i) {
    return this.meets(i).some((m) => {
      const at = this.waits[m].indexOf(j);
      return at >= 0 && at < this.bound[m];
    });
  }

  lane(i) { return this.lanes[this.laneOf[i]]; }
  device(i) { return this.devices[this.lane(i).device]; }
  text(i) { return this.strings[this.label[i]]; }
  isMessage(i) { return this.meeting[i] >= 0; }

  /** The first box of a lane that ends after `time`. */
  firstEndingAfter(lane, time) { return search(lane.first, lane.last, (i) => this.reach[i] > time); }

  /** The box of a lane that runs at `time` (the one that started last), or -1. */
  at(lane, time, slack = 0) {
    const stop = search(lane.first, lane.last, (i) => this.start[i] > time + slack);
    for (let i = stop - 1; i >= lane.first && this.reach[i] > time - slack; i--) {
      if (this.end[i] >= time - slack) return i;
    }
    return -1;
  }

  /** All boxes that lead to box i by what they waited for last, and all that followed from it in that way, without i. */
  chain(i) {
    const seen = new Set([i]);
    for (const step of [(j) => this.waits[j].slice(0, this.bound[j]), this.effects]) {
      const todo = [i];
      while (todo.length) {
        for (const j of step(todo.pop())) if (!seen.has(j)) { seen.add(j); todo.push(j); }
      }
    }
    seen.delete(i);
    return seen;
  }

  /**
   * The boxes that a search means. Every word must hold: "#12" is a node, "@3" a device, a word with "=" a whole tag,
   * any other word a part of the label, operation or stream.
   */
  find(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return null;
    const tests = words.map((word) => {
      if (/^#\d+$/.test(word)) return (i) => this.node[i] === Number(word.slice(1));
      if (/^@\d+$/.test(word)) return (i) => this.device(i).device === Number(word.slice(1));
      const whole = word.includes("=");
      const fits = this.strings.map((text) => {
        const low = text.toLowerCase();
        return whole ? low.split(/\s+/).includes(word) : low.includes(word);
      });
      const streams = this.lanes.map((lane) => !whole && lane.stream.toLowerCase().includes(word));
      return (i) => fits[this.label[i]] || fits[this.op[i]] || streams[this.laneOf[i]];
    });
    const found = [];
    for (let i = 0; i < this.n; i++) if (tests.every((test) => test(i))) found.push(i);
    return found;
  }

  /** The box that does the same as box i of another timeline: on the same device if possible; -1 if there is none. */
  counterpart(other, i) {
    this.index ??= this.#index();
    const what = `${other.strings[other.op[i]]} ${other.text(i)}`;
    return this.index.get(`${other.device(i).device} ${what}`) ?? this.index.get(what) ?? -1;
  }

  #index() {
    const index = new Map();
    for (let i = this.n - 1; i >= 0; i--) {
      const what = `${this.strings[this.op[i]]} ${this.text(i)}`;
      index.set(what, i);
      index.set(`${this.device(i).device} ${what}`, i);
    }
    return index;
  }
}

/** Of lists of boxes, one for each of n boxes: for each box, whose lists it is in. Kept in one array with offsets. */
function reversed(lists, n) {
  const offsets = new Int32Array(n + 1);
  for (const list of lists) for (const j of list) offsets[j + 1]++;
  for (let i = 0; i < n; i++) offsets[i + 1] += offsets[i];
  const found = new Int32Array(offsets[n]), next = offsets.slice();
  lists.forEach((list, i) => list.forEach((j) => { found[next[j]++] = i; }));
  return (i) => found.subarray(offsets[i], offsets[i + 1]);
}

/** The first i in [low, high) for which `holds` is true, given that it stays true; `high` if none. */
function search(low, high, holds) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

/** Times in seconds, categories that are ever used (the steadiest first), and the sum over them. */
function memoryCurve(raw) {
  const times = Float64Array.from(raw.times, (t) => t * 1e-9);
  const spread = (values) => values.reduce((a, v) => Math.max(a, v), 0) - values.reduce((a, v) => Math.min(a, v), Infinity);
  const categories = Object.entries(raw.nbytes)
    .filter(([, values]) => values.some((v) => v > 0))
    .map(([name, values]) => ({ name, nbytes: Float64Array.from(values), spread: spread(values) }))
    .sort((a, b) => a.spread - b.spread)
    .map((category, number) => ({ ...category, number }));
  const total = new Float64Array(times.length);
  for (const { nbytes } of categories) nbytes.forEach((v, i) => { total[i] += v; });
  return { times, categories, total, peak: total.reduce((a, v) => Math.max(a, v), 0) };
}
