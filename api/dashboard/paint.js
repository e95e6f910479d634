/* Drawing one chart on a canvas: grid, target band, lines, marks. Knows pixels and colours, nothing of jobs. */

import { limits, logTicks, scale, ticks } from "./axes.js";
import { number } from "./format.js";
import { firstAfter } from "./series.js";

const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2], [1, 2]];
export const NUM_COLOURS = 6;
const DENSE = 150;

/** The page's colours, read anew so that a change of theme is followed. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    text: read("--text-soft"), grid: read("--line"), band: read("--band"), target: read("--target"), cursor: read("--text"),
    error: read("--error"), warn: read("--warn"), surface: read("--surface"),
    series: Array.from({ length: NUM_COLOURS }, (_, index) => read(`--s${index + 1}`)),
  };
}

/** Steps and values of a series inside a range, with one neighbour on each side so that lines reach the edge. */
function visible(series, low, high) {
  const start = Math.max(0, firstAfter(series.steps, low - 1e-9) - 1);
  const end = Math.min(series.length, firstAfter(series.steps, high) + 1);
  return [start, end];
}

function* shownValues(data, low, high) {
  for (const line of data.lines) {
    const start = firstAfter(line.series.steps, low - 1e-9);
    const end = firstAfter(line.series.steps, high);
    for (let index = start; index < end; index += 1) {
      const value = line.series.values[index];
      const spread = line.spread?.at(line.series.steps[index]) ?? 0;
      yield value - spread;
      yield value + spread;
    }
  }
  const target = data.band?.at(high);
  if (target) yield* [target.low * 0.9, target.high * 1.1];
}

/** Draw all but the cursor. `view` = {width, height, low, high (steps), isLog, withZero}. Returns the scales, for the pointer. */
export function paint(context, data, view, colours) {
  const { width, height, low, high } = view;
  const [bottom, top] = limits(shownValues(data, low, high), view);
  const left = 56;
  const x = scale(low, high, left, width - 10);
  const y = scale(bottom, top, height - 24, 10, view.isLog);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  drawBand(context, data, x, y, colours);
  drawGrid(context, x, y, view, colours);
  context.save();
  context.beginPath();
  context.rect(left, 4, width - left - 6, height - 28);
  context.clip();
  for (const line of [...data.lines].sort((a, b) => Boolean(b.faint) - Boolean(a.faint))) {
    if (line.hidden) continue;
    const colour = colours.series[line.colour % NUM_COLOURS];
    context.globalAlpha = line.faint ? 0.55 : 1;
    if (line.spread) drawSpread(context, line, x, y, colour);
    drawLine(context, line, x, y, colour, DASHES[line.dash % DASHES.length], colours, height);
    context.globalAlpha = 1;
  }
  drawMarks(context, data.marks ?? [], x, y, view, colours);
  context.restore();
  return { x, y };
}

/** Draw the cursor on a canvas of its own, so that moving it leaves the curves alone. `scales` are what `paint` returned. */
export function paintCursor(context, data, { x, y }, view, colours) {
  context.clearRect(0, 0, view.width, view.height);
  if (view.cursor === null || view.cursor < x.low || view.cursor > x.high) return;
  drawCursor(context, data, x, y, view, colours);
}

function drawGrid(context, x, y, view, colours) {
  context.strokeStyle = colours.grid;
  context.fillStyle = colours.text;
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const values = y.isLog ? logTicks(y.low, y.high, 5) : ticks(y.low, y.high, 4);
  for (const value of values) {
    const at = Math.round(y.place(value)) + 0.5;
    context.beginPath();
    context.moveTo(52, at);
    context.lineTo(view.width - 8, at);
    context.stroke();
    context.fillText(number(value, 3), 48, at);
  }
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  const room = Math.max(2, Math.floor(view.width / 75));
  for (const step of ticks(x.low, x.high, room)) {
    if (view.wholeSteps && !Number.isInteger(step)) continue;
    const text = view.wholeSteps ? step.toLocaleString() : number(step, 3);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(x.place(step), view.width - half - 2), view.height - 7);
  }
}

/** The target and the band around it, wherever the target was known. */
function drawBand(context, data, x, y, colours) {
  const targets = data.band?.targets;
  if (!targets?.length) return;
  const clampY = (value) => y.place(y.isLog ? Math.max(value, 1e-12) : value);
  for (const run of runs(targets, Math.max(targets.lastStep, data.band.until ?? 0))) {
    const from = x.place(Math.max(run.from, x.low));
    const to = x.place(Math.min(run.to, x.high));
    if (to < from) continue;
    const { low, high, target } = data.band.around(run.value);
    const top = Math.max(4, clampY(high));
    const bottom = Math.min(clampY(low), y.place(y.low));
    context.fillStyle = colours.band;
    if (bottom > top) context.fillRect(from, top, Math.max(1, to - from), bottom - top);
    context.strokeStyle = colours.target;
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(from, clampY(target));
    context.lineTo(Math.max(to, from + 1), clampY(target));
    context.stroke();
    context.setLineDash([]);
  }
}

/** Stretches of equal value. */
function runs(series, end) {
  const found = [];
  series.steps.forEach((step, index) => {
    const value = series.values[index];
    if (found.at(-1)?.value === value) return;
    if (found.length) found.at(-1).to = step;
    found.push({ from: step, to: end, value });
  });
  return found;
}

function drawSpread(context, line, x, y, colour) {
  const [start, end] = visible(line.series, x.low, x.high);
  const { steps, values } = line.series;
  context.beginPath();
  for (let index = start; index < end; index += 1) context.lineTo(x.place(steps[index]), y.place(values[index] + (line.spread.at(steps[index]) ?? 0)));
  for (let index = end - 1; index >= start; index -= 1) context.lineTo(x.place(steps[index]), y.place(values[index] - (line.spread.at(steps[index]) ?? 0)));
  context.closePath();
  context.globalAlpha = 0.16;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}

function drawLine(context, line, x, y, colour, dash, colours, height) {
  const [start, end] = visible(line.series, x.low, x.high);
  const { steps, values } = line.series;
  context.strokeStyle = colour;
  context.fillStyle = colour;
  context.lineWidth = line.faint ? 1.25 : 2;
  context.lineJoin = end - start > DENSE ? "bevel" : "round";
  context.setLineDash(dash);
  context.beginPath();
  let isDown = false;
  const broken = [];
  for (let index = start; index < end; index += 1) {
    const value = values[index];
    const isHidden = y.isLog && value <= 0;
    if (!Number.isFinite(value) || isHidden) {
      if (!isHidden) broken.push(steps[index]);
      isDown = false;
      continue;
    }
    const [px, py] = [x.place(steps[index]), y.place(value)];
    if (isDown && line.isStepped) context.lineTo(px, y.place(values[index - 1]));
    if (isDown) context.lineTo(px, py);
    else context.moveTo(px, py);
    isDown = true;
  }
  context.stroke();
  context.setLineDash([]);
  if (end - start <= 3 || line.isDotted) {
    for (let index = start; index < end; index += 1) dot(context, x.place(steps[index]), y.place(values[index]), 2.5);
  }
  context.fillStyle = colours.error;
  for (const step of broken) context.fillText("×", x.place(step), height - 28);
}

function dot(context, px, py, radius) {
  if (!Number.isFinite(py)) return;
  context.beginPath();
  context.arc(px, py, radius, 0, 2 * Math.PI);
  context.fill();
}

/** Alarms are vertical lines with a flag; actions of the rule are arrows at the foot. */
function drawMarks(context, marks, x, y, view, colours) {
  for (const mark of marks) {
    if (mark.step < x.low || mark.step > x.high) continue;
    const at = x.place(mark.step);
    const isUp = mark.kind === "up";
    context.fillStyle = mark.kind === "alarm" ? colours[mark.level === "error" ? "error" : "warn"] : colours.text;
    context.strokeStyle = context.fillStyle;
    context.beginPath();
    if (mark.kind === "alarm") {
      context.lineWidth = 1.25;
      context.setLineDash([3, 3]);
      context.moveTo(at, 10);
      context.lineTo(at, view.height - 24);
      context.stroke();
      context.setLineDash([]);
      context.beginPath();
      context.moveTo(at, 4);
      context.lineTo(at + (at + 9 > view.width - 6 ? -9 : 9), 8.5);
      context.lineTo(at, 13);
    } else {
      const foot = view.height - 27;
      context.moveTo(at - 4, isUp ? foot : foot - 7);
      context.lineTo(at + 4, isUp ? foot : foot - 7);
      context.lineTo(at, isUp ? foot - 7 : foot);
    }
    context.fill();
  }
}

function drawCursor(context, data, x, y, view, colours) {
  const at = x.place(view.cursor);
  context.strokeStyle = colours.cursor;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(at, 6);
  context.lineTo(at, view.height - 24);
  context.stroke();
  data.lines.forEach((line) => {
    const near = line.hidden ? -1 : line.series.nearest(view.cursor);
    if (near < 0) return;
    const value = line.series.values[near];
    if (!Number.isFinite(value) || (y.isLog && value <= 0)) return;
    context.fillStyle = colours.series[line.colour % NUM_COLOURS];
    dot(context, x.place(line.series.steps[near]), y.place(value), 4);
  });
}
