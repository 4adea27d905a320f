// What the page shows, numbers for people, and colours.

const DATA = JSON.parse(document.getElementById("data").textContent);

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const timeUnit = DATA.unit; // "s", or "F": forwards

/** The unit that suits so many seconds, and its name. */
function unitFor(value) {
  if (timeUnit !== "s") return [1, timeUnit];
  return UNITS.find(([size]) => Math.abs(value) >= 0.9995 * size) ?? [1, "s"]; // not "1000 µs"
}

/** Seconds in the unit that suits `like` (by default themselves): "12.3 ms". */
function seconds(value, like = value) {
  const [size, unit] = unitFor(like);
  return `${value === 0 ? 0 : digits(value / size, like / size)} ${unit}`.trim();
}

/** As many decimals as `like` needs for three digits that say something. */
function digits(value, like = value) {
  const size = Math.abs(like);
  if (size >= 1e6) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

/** Bytes in powers of 1024: "3.2 MiB". */
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (Math.abs(value) >= 1000 && i + 1 < units.length) { value /= 1024; i++; }
  return `${i === 0 ? value : digits(value)} ${units[i]}`;
}

/** A count in powers of 1000: "1.2 T". */
function count(value) {
  const units = ["", "k", "M", "G", "T", "P", "E"];
  let i = 0;
  while (Math.abs(value) >= 1000 && i + 1 < units.length) { value /= 1000; i++; }
  return `${Number.isInteger(value) && i === 0 ? value : digits(value)} ${units[i]}`;
}

/** "1 device", "2 devices". */
function plural(number, word) { return `${number} ${word}${number === 1 ? "" : "s"}`; }

function percent(share, decimals = 1) { return `${(100 * share).toFixed(decimals)} %`; }

/** Distances for marks on an axis: 1, 2 or 5 times a power of ten, at least `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= least * (1 - 1e-9));
}

const PASSES = DATA.passes; // the last one is for all that belongs to no pass
const PASS_INDEX = new Map(PASSES.map((pass, i) => [pass.name, i]));

// What stays all along in greys, what comes and goes in colours that no pass has.
const MEMORY_COLOURS = {
  parameters: "#5d6b7d", shards: "#76859a", optimizer: "#93a1b3", buffers: "#b3bdca", gathered: "#999933",
  gradients: "#cc6677", activations: "#ddcc77", communication: "#94537f", other: "#4a4f57",
};
const MEMORY_SPARE = ["#7a68a6", "#467821", "#a60628"];

function rgb(hex) { return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)); }

/** `share` of colour b in colour a, both [r, g, b]. */
function mix(a, b, share) { return a.map((v, i) => v + (b[i] - v) * share); }

function css(colour) { return `rgb(${colour.map(Math.round).join(" ")})`; }

/** Black or white, whichever reads better on a colour. */
function inkOn(colour) {
  const [r, g, b] = colour.map((v) => ((v / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#0b0f14" : "#ffffff";
}

/** The colours of one theme. Box colours are numbered: see `boxColour`. */
class Palette {
  constructor(dark) {
    const root = getComputedStyle(document.documentElement);
    const get = (name) => root.getPropertyValue(name).trim();
    this.back = rgb(get("--panel"));
    [this.panel, this.text, this.soft, this.line, this.sunk, this.accent, this.critical] =
      ["--panel", "--text", "--soft", "--line", "--sunk", "--accent", "--critical"].map(get);
    this.colours = [];
    for (const { colour, darker } of PASSES) {
      for (const [odd, message, dim] of VARIANTS) {
        let found = rgb(odd ? darker : colour);
        if (dark) found = mix(found, [255, 255, 255], 0.06);
        if (message) found = mix(found, this.back, 0.4);
        if (dim) found = mix(found, this.back, 0.8);
        this.colours.push(found);
      }
    }
    this.css = this.colours.map(css);
    this.packed = Uint32Array.from(this.colours, packed);
    this.parts = Float32Array.from(this.colours.flat());
    this.inks = this.colours.map((colour, i) => rgb(i & 1 ? this.soft : inkOn(colour)));
    this.backs = [this.back, mix(this.back, rgb(this.sunk), 0.45)]; // of every second device
    const line = rgb(this.line);
    this.pixels = {
      panel: packed(this.back), band: packed(this.backs[1]), line: packed(mix(this.back, line, 0.7)), edge: packed(line), critical: packed(rgb(this.critical)),
    };
  }

  memory(category, index) { return css(this.#memory(category, index)); }
  memoryPixels(category, index) { return packed(this.#memory(category, index)); }

  #memory(category, index) {
    return mix(this.back, rgb(MEMORY_COLOURS[category] ?? MEMORY_SPARE[index % MEMORY_SPARE.length]), 0.72);
  }
}

const VARIANTS = [...Array(8).keys()].map((i) => [i & 4, i & 2, i & 1]);

/** Number of a box's colour: its pass, every second stage of a device, communication, dimmed. */
function boxColour(pass, odd, message, dim) {
  return pass * 8 + (odd ? 4 : 0) + (message ? 2 : 0) + (dim ? 1 : 0);
}
