/* A chart: canvas, legend with values, table for readers who prefer one. Charts of a group share zoom and cursor. */

import { h, setText, svg, uniqueId } from "./dom.js";
import { number } from "./format.js";
import { listen } from "./chart_input.js";
import { paint, paintCursor, palette } from "./paint.js";
import { firstAfter } from "./series.js";

const HEIGHT = 220;
const TABLE_ROWS = 40;
const SMALLEST_VIEW = 4;

/** What charts have in common: the range of steps in view (null = all) and the step under the cursor. */
export class ChartGroup {
  constructor({ onZoom, onPoint } = {}) {
    this.charts = new Set();
    this.range = null;
    this.cursor = null;
    this.extent = [1, 2];
    this.onZoom = onZoom ?? (() => {});
    this.onPoint = onPoint ?? (() => {});
  }

  /** The steps in view. */
  get window() { return this.range ?? this.extent; }

  /** The range the data covers; the view follows it unless zoomed. */
  setExtent(low, high) {
    this.extent = [low, Math.max(high, low + 1)];
    this.redraw();
  }

  /** Look at some steps only, four at least; null = all. */
  zoom(range) {
    if (range) {
      const [first, last] = this.extent;
      let low = Math.max(first, Math.min(...range));
      const high = Math.min(last, Math.max(low + SMALLEST_VIEW, Math.max(...range)));
      low = Math.max(first, Math.min(low, high - SMALLEST_VIEW));
      this.range = low <= first && high >= last ? null : [low, high];
    } else this.range = null;
    this.redraw();
    this.onZoom(this.range);
  }

  /** Move the cursor of all charts; null hides it. */
  point(step) {
    this.cursor = step === null ? null : Math.min(this.extent[1], Math.max(this.extent[0], step));
    for (const chart of this.charts) chart.scheduleCursor();
    this.onPoint(this.cursor);
  }

  redraw() { for (const chart of this.charts) chart.schedule(); }
}

/**
 * `options`: title, unit, description, isLog, withZero, canLog, empty (text without data), formatStep.
 * `setData({lines: [{label, series, colour?, dash?, spread?, isStepped?}], band?, marks?})` draws.
 */
export class Chart {
  constructor(group, options) {
    this.group = group;
    this.options = { isLog: false, withZero: false, wholeSteps: true, axis: "step", ...options };
    this.data = { lines: [], marks: [] };
    this.hidden = new Set();
    this.#build();
    group.charts.add(this);
    this.observer = new ResizeObserver(() => this.schedule());
    this.observer.observe(this.stage);
    this.isVisible = false;
    this.sight = new IntersectionObserver((entries) => { this.isVisible = entries.at(-1).isIntersecting; this.schedule(); }, { rootMargin: "200px" });
    this.sight.observe(this.element);
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => { this.colours = null; this.schedule(); };
    this.theme.addEventListener("change", this.repaint);
  }

  #build() {
    const heading = uniqueId("chart");
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.overlay = h("canvas", { "aria-hidden": "true", class: "overlay" });
    this.selection = h("div", { class: "selection", hidden: true });
    this.stage = h("div", {
      class: "stage", tabindex: "0", role: "slider", "aria-labelledby": heading, "aria-orientation": "horizontal",
      "aria-valuemin": "0", "aria-valuemax": "1", "aria-valuenow": "0", "aria-valuetext": "no data yet",
    }, this.canvas, this.overlay, this.selection);
    this.empty = h("p", { class: "chart-empty", hidden: true }, this.options.empty ?? "No values yet.");
    this.legend = h("ul", { class: "legend" });
    this.alarm = h("p", { class: "alarm", hidden: true });
    this.log = h("button", { type: "button", class: "small", "aria-pressed": String(this.options.isLog), on: { click: () => this.#toggleLog() } }, "log");
    this.table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${this.options.title}, values` });
    this.details = h("details", { class: "values", on: { toggle: () => this.#fillTable() } }, h("summary", {}, "Values as a table"), this.table);
    this.element = h("figure", { class: "chart" },
      h("figcaption", {},
        h("h3", { id: heading }, this.options.title, h("span", { class: "unit" }, this.options.unit ? ` ${this.options.unit}` : "")),
        this.options.canLog ? this.log : null),
      this.options.description ? h("p", { class: "hint" }, this.options.description) : null,
      h("div", { class: "frame" }, this.stage, this.empty), this.legend, this.alarm, this.details);
    this.release = listen(this);
  }

  /** New lines, band or marks; kept by reference, so call again (or `schedule`) after the series grew. */
  setData(data) {
    const labels = (lines) => lines.map((line) => line.label).join("\n");
    const isSame = labels(data.lines) === labels(this.data.lines);
    this.data = data;
    if (!isSame) this.#fillLegend();
    this.schedule();
  }

  /** What stands where there are no values. */
  setEmpty(text) { setText(this.empty, text); }

  /** Draw with the next frame, or as soon as the chart comes into view. */
  schedule() {
    this.isStale = true;
    this.scheduleCursor();
  }

  /** Draw the cursor, and nothing else unless something else has changed. */
  scheduleCursor() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; this.#draw(); });
  }

  /** Let go of everything. */
  dispose() {
    cancelAnimationFrame(this.frame);
    this.observer.disconnect();
    this.sight.disconnect();
    this.theme.removeEventListener("change", this.repaint);
    this.release();
    this.group.charts.delete(this);
  }

  #draw() {
    this.empty.hidden = this.data.lines.some((line) => line.series.length);
    this.#read();
    const width = this.stage.clientWidth;
    if (!width || !this.isVisible) return;
    this.colours ??= palette();
    const [low, high] = this.group.window;
    const view = { ...this.options, width, height: HEIGHT, low, high, cursor: this.group.cursor };
    if (this.isStale) {
      for (const line of this.data.lines) line.hidden = this.hidden.has(line.label);
      this.shown = { ...this.data, lines: this.data.lines.map((line, index) => ({ colour: index, dash: index, ...line })) };
      this.scales = paint(sized(this.canvas, width), this.shown, view, this.colours);
      this.isStale = false;
    }
    paintCursor(sized(this.overlay, width), this.shown, this.scales, view, this.colours);
  }

  /** Values at the cursor, or the latest, in the legend and for screen readers. */
  #read() {
    const { cursor } = this.group;
    const texts = this.data.lines.map((line, index) => {
      const near = cursor === null ? line.series.length - 1 : line.series.nearest(cursor);
      const text = near < 0 ? "–" : number(line.series.values[near]);
      const item = this.legend.children[index];
      if (item) setText(item.querySelector(".reading"), text);
      return this.hidden.has(line.label) ? null : `${line.label} ${text}`;
    });
    const step = cursor ?? this.data.lines[0]?.series.lastStep ?? 0;
    this.stage.setAttribute("aria-valuemin", String(this.group.extent[0]));
    this.stage.setAttribute("aria-valuemax", String(this.group.extent[1]));
    this.stage.setAttribute("aria-valuenow", String(step));
    const alarm = this.#nearAlarm(step);
    this.alarm.hidden = !alarm;
    setText(this.alarm, alarm ? `⚑ step ${alarm.step.toLocaleString()}: ${alarm.text}` : "");
    this.stage.setAttribute("aria-valuetext", `${this.options.axis} ${number(step)}: ${texts.filter(Boolean).join(", ") || "no values"}${alarm ? `. Alarm: ${alarm.text}` : ""}`);
  }

  /** The alarm under the cursor; without a cursor the latest in view. */
  #nearAlarm(step) {
    const [low, high] = this.group.window;
    const alarms = (this.data.marks ?? []).filter((mark) => mark.kind === "alarm" && mark.step >= low && mark.step <= high);
    if (this.group.cursor === null) return alarms.at(-1);
    return alarms.findLast((mark) => Math.abs(mark.step - step) <= (high - low) / 60);
  }

  #fillLegend() {
    this.legend.replaceChildren(...this.data.lines.map((line, index) => {
      const colour = ((line.colour ?? index) % 6) + 1;
      const swatch = svg("svg", { viewBox: "0 0 24 8", class: `swatch s${colour} d${((line.dash ?? index) % 6) + 1}`, "aria-hidden": "true" },
        svg("line", { x1: 0, y1: 4, x2: 24, y2: 4 }));
      const toggle = h("button", {
        type: "button", class: "key", "aria-pressed": String(!this.hidden.has(line.label)), title: line.title ?? `Show or hide ${line.label}`,
        on: { click: (event) => this.#toggle(line.label, event.currentTarget) },
      }, swatch, h("span", {}, line.label), h("span", { class: "reading" }));
      return h("li", {}, toggle);
    }));
  }

  #toggle(label, element) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    element.setAttribute("aria-pressed", String(!this.hidden.has(label)));
    this.schedule();
  }

  #toggleLog() {
    this.options.isLog = !this.options.isLog;
    this.log.setAttribute("aria-pressed", String(this.options.isLog));
    this.schedule();
  }

  /** At most 40 rows, evenly spread over the view. */
  #fillTable() {
    if (!this.details.open) return this.table.replaceChildren();
    const [low, high] = this.group.window;
    const steps = [...new Set(this.data.lines.flatMap((line) => line.series.steps))].sort((a, b) => a - b);
    const within = steps.slice(firstAfter(steps, low - 1e-9), firstAfter(steps, high));
    const stride = Math.max(1, Math.ceil(within.length / TABLE_ROWS));
    const rows = within.filter((_, index) => index % stride === 0 || index === within.length - 1);
    const cell = (line, step) => {
      const index = firstAfter(line.series.steps, step) - 1;
      return h("td", {}, line.series.steps[index] === step ? number(line.series.values[index]) : "");
    };
    return this.table.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, this.options.axis), this.data.lines.map((line) => h("th", { scope: "col" }, line.label)))),
      h("tbody", {}, rows.map((step) => h("tr", {}, h("th", { scope: "row" }, number(step)), this.data.lines.map((line) => cell(line, step)))))));
  }
}

/** The canvas' context in page pixels, at the screen's resolution. */
function sized(canvas, width) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(HEIGHT * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
