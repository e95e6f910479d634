/* Numbers, times and sizes as people read them. */

/** A number of the API: a float, or {value: null, nonfinite}; null stays null. */
export function toNumber(raw) {
  if (raw === null || raw === undefined) return null;
  if (typeof raw === "number") return raw;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[raw.nonfinite] ?? null;
}

/** Four significant digits, exponents only where they shorten; "–" when there is no value. */
export function number(raw, digits = 4) {
  const value = toNumber(raw);
  if (value === null) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "not a number" : value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e6) return value.toExponential(Math.max(0, digits - 2)).replace("-", "−").replace(/\.?0+e/, "e").replace("e+", "e");
  const text = Number(value.toPrecision(digits)).toString();
  return text.replace("-", "−");
}

/** Seconds as a duration. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/* One for all: making it anew for every line of a long list takes longer than the list. */
const CLOCK = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

/** A Unix second as local date and time. */
export function time(seconds) {
  return seconds === null || seconds === undefined ? "–" : CLOCK.format(seconds * 1000);
}

/** How long ago a Unix second was. */
export function ago(seconds, now = Date.now() / 1000) {
  return seconds === null || seconds === undefined ? "–" : `${duration(now - seconds)} ago`;
}

/** Bytes with a unit. */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit === 0 ? value : value.toPrecision(3)} ${units[unit]}`;
}

/** "1 job", "2 jobs". */
export function count(amount, word) {
  return `${amount.toLocaleString()} ${word}${amount === 1 ? "" : "s"}`;
}
