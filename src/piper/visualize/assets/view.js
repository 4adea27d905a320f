// Which part of the step is shown.

/** The part of the step that is shown, for all charts at once. */
class View {
  constructor(from, until, changed) {
    this.from = from;
    this.until = until;
    this.changed = changed;
    this.goal = null; // where a movement leads
    this.t0 = from;
    this.t1 = this.latest;
  }

  /** A little room after the end. */
  get latest() { return this.until + 0.015 * (this.until - this.from); }
  get length() { return this.t1 - this.t0; }

  /** Show [t0, t1], moved and cut to what there is. */
  show(t0, t1) {
    cancelAnimationFrame(this.gliding);
    this.goal = null;
    this.#set(t0, t1);
  }

  /** The same, in a short movement. */
  glide(t0, t1) {
    cancelAnimationFrame(this.gliding);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { this.show(t0, t1); return; }
    this.goal = [t0, t1];
    const a0 = this.t0, a1 = this.t1, begin = performance.now();
    const step = (now) => {
      const s = Math.min(1, Math.max(0, now - begin) / 140), eased = 1 - (1 - s) ** 3;
      this.#set(a0 + (t0 - a0) * eased, a1 + (t1 - a1) * eased);
      if (s < 1) this.gliding = requestAnimationFrame(step);
      else this.goal = null;
    };
    this.gliding = requestAnimationFrame(step);
  }

  #set(t0, t1) {
    const whole = this.latest - this.from;
    const length = Math.min(whole, Math.max(t1 - t0, whole * 1e-7, 2e-9));
    const centre = (t0 + t1) / 2;
    this.t0 = Math.min(Math.max(centre - length / 2, this.from), this.latest - length);
    this.t1 = this.t0 + length;
    this.changed();
  }

  /** Zoom by a factor, keeping the time `at` (by default the middle) where it is; from where a movement leads, if one is under way. */
  zoomed(factor, at = null) {
    const [t0, t1] = this.goal ?? [this.t0, this.t1];
    const fixed = at ?? (t0 + t1) / 2;
    return [fixed - (fixed - t0) / factor, fixed + (t1 - fixed) / factor];
  }

  /** Go sideways by a share of what is shown, in the same way. */
  shifted(share) {
    const [t0, t1] = this.goal ?? [this.t0, this.t1], by = share * (t1 - t0);
    return [t0 + by, t1 + by];
  }

  move(by) { this.show(this.t0 + by, this.t1 + by); }
}
