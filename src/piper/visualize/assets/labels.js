// Texts in boxes, as masks that are painted into an array of pixels.

const FAMILY = 'system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif';
const FONT = `11px ${FAMILY}`, SMALL_FONT = `10px ${FAMILY}`;
const NEW_MASKS = 150; // how many a frame makes at most: the others follow in the next ones
const CAPITAL = 0.72; // height of a capital letter, in sizes of the font: texts are centred by it
const MOST_MASKS = 20000; // how many are kept

/** The texts of one size. */
class Labels {
  constructor(size) {
    this.size = size; // CSS pixels
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
    this.reset(1);
  }

  /** Pixels of the device per CSS pixel. */
  reset(ratio) {
    if (this.ratio === ratio) return;
    this.ratio = ratio;
    this.font = `${this.size * ratio}px ${FAMILY}`;
    this.context.font = this.font;
    this.widths = new Map();
    this.masks = new Map();
  }

  /** Frames begin with this. */
  begin() { this.left = NEW_MASKS; }

  /** Whether a text was left out since its mask was not made yet. */
  get incomplete() { return this.left < 0; }

  /** CSS pixels. */
  width(text) {
    let width = this.widths.get(text);
    if (width === undefined) this.widths.set(text, width = this.context.measureText(text).width / this.ratio);
    return width;
  }

  /** Paint a text around a point, in pixels of the device, in the colour [red, green, blue]. */
  paint(raster, text, x, y, [red, green, blue]) {
    const mask = this.masks.get(text) ?? this.#make(text);
    if (!mask) return;
    const { dx, dy, shares } = mask, left = Math.round(x - mask.middle), top = Math.round(y) - mask.rise;
    for (let k = 0; k < shares.length; k++) {
      const px = left + dx[k], py = top + dy[k];
      if (py >= 0 && py < raster.height && px >= 0 && px < raster.width) raster.blend(py * raster.width + px, red, green, blue, shares[k]);
    }
  }

  /** The pixels that a text covers, and how much of each. */
  #make(text) {
    if (--this.left < 0) return null;
    if (this.masks.size >= MOST_MASKS) this.masks.clear();
    const { canvas, context: c, ratio } = this;
    const width = Math.ceil(this.width(text) * ratio) + 4, height = Math.ceil(this.size * ratio * 1.7);
    if (canvas.width < width || canvas.height < height) {
      canvas.width = Math.max(width, canvas.width); // also empties it, and forgets the font
      canvas.height = Math.max(height, canvas.height);
      c.font = this.font;
    } else {
      c.clearRect(0, 0, width, height);
    }
    const baseline = Math.round(height * 0.7);
    c.fillText(text, 2, baseline);
    const { data } = c.getImageData(0, 0, width, height);
    const covered = [];
    for (let p = 0; p < width * height; p++) if (data[4 * p + 3] > 8) covered.push(p);
    const mask = {
      dx: Int16Array.from(covered, (p) => p % width), dy: Int16Array.from(covered, (p) => Math.floor(p / width)),
      shares: Float32Array.from(covered, (p) => data[4 * p + 3] / 255), middle: width / 2, rise: baseline - Math.round(CAPITAL / 2 * this.size * ratio),
    };
    this.masks.set(text, mask);
    return mask;
  }
}
