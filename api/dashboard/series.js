/* One metric over steps. Memory is bounded: beyond a limit, neighbours are merged and only the telling points stay. */

import { toNumber } from "./format.js";

export const LIMIT = 2000;

export class Series {
  constructor(limit = LIMIT) {
    this.limit = limit;
    this.steps = [];
    this.values = [];
  }

  get length() { return this.steps.length; }
  get lastStep() { return this.steps.at(-1) ?? 0; }
  get last() { return this.values.at(-1) ?? null; }

  /** Add a step's value. A step that is not new supersedes itself and everything after it. */
  append(step, value) {
    if (step <= this.lastStep) this.truncate(step - 1);
    this.steps.push(step);
    this.values.push(value);
    if (this.steps.length > this.limit) this.#thin();
  }

  /** Forget everything after a step. */
  truncate(step) {
    const end = firstAfter(this.steps, step);
    this.steps.length = end;
    this.values.length = end;
  }

  /** Index of the point nearest to a step; -1 when there is none. */
  nearest(step) {
    const after = firstAfter(this.steps, step);
    if (after === 0) return this.steps.length ? 0 : -1;
    if (after === this.steps.length) return after - 1;
    return step - this.steps[after - 1] <= this.steps[after] - step ? after - 1 : after;
  }

  /** The value that held at a step: the latest at or before it. */
  at(step) {
    const index = firstAfter(this.steps, step) - 1;
    return index < 0 ? null : this.values[index];
  }

  #thin() {
    const width = Math.ceil(this.steps.length / (this.limit / 8));
    const kept = [];
    for (let start = 0; start < this.steps.length; start += width) {
      kept.push(...telling(this.values, start, Math.min(start + width, this.steps.length)));
    }
    this.steps = kept.map((index) => this.steps[index]);
    this.values = kept.map((index) => this.values[index]);
  }
}

/** Indexes of the first, last, smallest and largest value of a stretch, in order. */
function telling(values, start, end) {
  let low = start;
  let high = start;
  for (let index = start; index < end; index += 1) {
    if (!(values[index] >= values[low])) low = index;
    if (!(values[index] <= values[high])) high = index;
  }
  return [...new Set([start, low, high, end - 1])].sort((a, b) => a - b);
}

/** Index of the first entry above `step` in ascending `steps`. */
export function firstAfter(steps, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** A series of the API's buckets: each bucket's first, smallest, largest and last point. */
export function fromBuckets(buckets, limit = LIMIT) {
  const series = new Series(limit);
  for (const bucket of buckets) {
    const points = [bucket.first, bucket.min, bucket.max, bucket.last].filter(Boolean);
    points.sort((a, b) => a.step - b.step);
    for (const point of points) {
      if (point.step !== series.steps.at(-1)) {
        series.steps.push(point.step);
        series.values.push(toNumber(point.value));
      }
    }
  }
  return series;
}
