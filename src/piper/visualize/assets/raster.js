// An array of pixels, and painting into it.

/** A colour as one number, in the order of the bytes of an ImageData. */
function packed([red, green, blue]) {
  return (255 << 24 | Math.round(blue) << 16 | Math.round(green) << 8 | Math.round(red)) >>> 0;
}

/** A picture without transparency. What is painted outside of it is cut off. */
class Raster {
  constructor() {
    this.width = this.height = 0;
    this.pixels = new Uint32Array(0);
  }

  /** Pixels of the device; contents are lost when the size changes. */
  resize(width, height) {
    if (width === this.width && height === this.height) return;
    Object.assign(this, { width, height, image: new ImageData(width, height) });
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  fill(left, top, right, bottom, colour) {
    const x0 = Math.max(left, 0), x1 = Math.min(right, this.width);
    if (x1 <= x0) return;
    for (let y = Math.max(top, 0), last = Math.min(bottom, this.height); y < last; y++) {
      this.pixels.fill(colour, y * this.width + x0, y * this.width + x1);
    }
  }

  /** Mix `share` (0 to 1) of a colour into one pixel. */
  blend(at, red, green, blue, share) {
    const old = this.pixels[at], rest = 1 - share;
    const r = (old & 255) * rest + red * share + 0.5, g = (old >> 8 & 255) * rest + green * share + 0.5;
    const b = (old >> 16 & 255) * rest + blue * share + 0.5;
    this.pixels[at] = (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  }

  /** Copy line `top` to the lines below, until `bottom`. */
  repeat(top, bottom) {
    const { width, pixels } = this;
    for (let y = top + 1; y < bottom; y++) pixels.copyWithin(y * width, top * width, (top + 1) * width);
  }

  draw(context, x, y) { context.putImageData(this.image, x, y); }
}
