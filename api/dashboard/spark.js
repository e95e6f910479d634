/* Sparklines: a small line with its latest value, as SVG. */

import { h, svg } from "./dom.js";
import { number } from "./format.js";

const [WIDTH, HEIGHT] = [96, 24];

/** A line through a series' finite values; `target` adds a dashed level. */
export function sparkline(label, series, { target = null, colour = 1 } = {}) {
  const points = series.steps.map((step, index) => [step, series.values[index]]).filter(([, value]) => Number.isFinite(value));
  const latest = number(series.last);
  if (points.length === 0) return h("span", { class: "spark" }, h("span", { class: "soft" }, "–"));
  const values = points.map(([, value]) => value).concat(target === null ? [] : [target]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const x = (step) => 1 + ((step - first) / (last - first || 1)) * (WIDTH - 5);
  const y = (value) => HEIGHT - 3 - ((value - low) / (high - low || 1)) * (HEIGHT - 6);
  const path = points.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: `s${colour}`, role: "img", "aria-label": summary(label, points, target) },
    target === null ? null : svg("line", { x1: 0, x2: WIDTH, y1: y(target), y2: y(target), class: "spark-target" }),
    svg("path", { d: path, fill: "none" }),
    svg("circle", { cx: x(last), cy: y(points.at(-1)[1]), r: 2 }));
  return h("span", { class: "spark" }, picture, h("span", { class: "spark-value", "aria-hidden": "true" }, latest));
}

function summary(label, points, target) {
  const values = points.map(([, value]) => value);
  const against = target === null ? "" : `, target ${number(target)}`;
  return `${label} ${number(values.at(-1))}, from ${number(Math.min(...values))} to ${number(Math.max(...values))} over ${points.length} points${against}`;
}
