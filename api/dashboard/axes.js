/* Scales and ticks of the charts: pure functions. */

/** Round values between two limits, about `wanted` of them. */
export function ticks(low, high, wanted = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let index = Math.ceil(low / unit); index * unit <= high + unit * 1e-9; index += 1) found.push(Number((index * unit).toPrecision(12)));
  return found;
}

/** Powers of ten between two positive limits, thinned to about `wanted`; finer when there would be fewer than two. */
export function logTicks(low, high, wanted = 5) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const stride = Math.max(1, Math.ceil((last - first + 1) / wanted));
  const found = [];
  for (let exponent = first; exponent <= last; exponent += stride) found.push(10 ** exponent);
  return found.length >= 2 ? found : ticks(low, high, wanted);
}

/** A vertical or horizontal scale. `from`, `to` are pixels. */
export function scale(low, high, from, to, isLog = false) {
  const convert = isLog ? Math.log10 : (value) => value;
  const [start, end] = [convert(low), convert(high)];
  const span = end - start || 1;
  return {
    low, high, isLog,
    place: (value) => from + ((convert(value) - start) / span) * (to - from),
    value: (pixel) => {
      const value = start + ((pixel - from) / (to - from || 1)) * span;
      return isLog ? 10 ** value : value;
    },
  };
}

/** Smallest and largest finite value, widened a little; `isLog` looks at positive values only. */
export function limits(values, { isLog = false, withZero = false } = {}) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value) || (isLog && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return isLog ? [0.001, 1] : [0, 1];
  if (isLog) return low === high ? [low / 2, high * 2] : [low / 1.2, high * 1.2];
  if (withZero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [withZero && low === 0 ? 0 : low - pad, high + pad];
}
