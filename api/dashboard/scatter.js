/* One quantity against another, for several jobs: points with the latest ringed, values on hover and by key. */

import { limits, scale, ticks } from "./axes.js";
import { h, setText, svg, uniqueId } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 260;
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 12, 10, 38];
const SHAPES = ["M-1 0A1 1 0 1 0 1 0A1 1 0 1 0-1 0", "M-1-1H1V1H-1Z", "M0-1.2L1.1.9H-1.1Z", "M0-1.3L1.3 0L0 1.3L-1.3 0Z", "M-.4-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4Z", "M0 1.2L1.1-.9H-1.1Z"];

/** `setData([{label, colour, points: [{x, y, step}]}])`. */
export class Scatter {
  constructor({ title, description }) {
    const heading = uniqueId("scatter");
    this.clouds = [];
    this.picture = svg("svg", { class: "scatter", role: "img", "aria-labelledby": heading });
    this.reading = h("p", { class: "hint", role: "status" }, "Point at the picture, or focus it and use the arrow keys.");
    this.stage = h("div", {
      class: "scatter-stage", tabindex: "0", role: "group", "aria-labelledby": heading,
      on: { pointermove: (event) => this.#hover(event), pointerleave: () => this.#choose(-1), keydown: (event) => this.#key(event) },
    }, this.picture);
    this.legend = h("ul", { class: "legend" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("h3", { id: heading }, title)), h("p", { class: "hint" }, description), this.stage, this.legend, this.reading);
    this.chosen = -1;
    this.observer = new ResizeObserver(() => this.#draw());
    this.observer.observe(this.stage);
  }

  dispose() { this.observer.disconnect(); }

  setData(clouds) {
    this.clouds = clouds;
    this.legend.replaceChildren(...clouds.map((cloud) => h("li", { class: "key" },
      svg("svg", { viewBox: "-2 -2 4 4", class: `shape s${(cloud.colour % 6) + 1}`, "aria-hidden": "true" }, shape(cloud, 0, 0, 1.4, "point")), cloud.label)));
    this.points = clouds.flatMap((cloud) => cloud.points.map((point) => ({ ...point, cloud })));
    this.#draw();
  }

  #draw() {
    const width = this.stage.clientWidth;
    if (!width || !this.points) return;
    const [x0, x1] = limits(this.points.map((point) => point.x), { withZero: true });
    const [y0, y1] = limits(this.points.map((point) => point.y));
    this.x = scale(x0, x1, LEFT, width - RIGHT);
    this.y = scale(y0, y1, HEIGHT - BOTTOM, TOP);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.setAttribute("width", width);
    this.picture.setAttribute("height", HEIGHT);
    const grid = [
      ...ticks(y0, y1, 4).map((value) => [svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: this.y.place(value), y2: this.y.place(value) }),
        svg("text", { x: LEFT - 5, y: this.y.place(value) + 4, "text-anchor": "end" }, number(value, 3))]),
      ...ticks(x0, x1, Math.max(2, Math.floor(width / 110))).map((value) => svg("text", { x: this.x.place(value), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, number(value, 3))),
      svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "KL, nats per token"),
    ];
    this.mark = svg("circle", { r: 6, class: "mark", visibility: "hidden" });
    this.picture.replaceChildren(...grid.flat(), ...this.clouds.map((cloud) => this.#cloud(cloud)), this.mark);
  }

  #cloud(cloud) {
    const group = svg("g", { class: `s${(cloud.colour % 6) + 1}` });
    cloud.points.forEach((point, index) => {
      const isLast = index === cloud.points.length - 1;
      group.append(shape(cloud, this.x.place(point.x), this.y.place(point.y), isLast ? 6 : 2.6, isLast ? "latest" : "point"));
    });
    return group;
  }

  #hover(event) {
    if (!this.points?.length) return;
    const box = this.stage.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = -1;
    let nearest = 900;
    this.points.forEach((point, index) => {
      const far = (this.x.place(point.x) - px) ** 2 + (this.y.place(point.y) - py) ** 2;
      if (far < nearest) [nearest, best] = [far, index];
    });
    this.#choose(best);
  }

  #key(event) {
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!by || !this.points?.length) return;
    event.preventDefault();
    this.#choose((this.chosen + by + this.points.length) % this.points.length);
  }

  #choose(index) {
    this.chosen = index;
    const point = this.points?.[index];
    this.mark?.setAttribute("visibility", point ? "visible" : "hidden");
    if (!point) return;
    this.mark.setAttribute("cx", this.x.place(point.x));
    this.mark.setAttribute("cy", this.y.place(point.y));
    setText(this.reading, `${point.cloud.label}, step ${point.step.toLocaleString()}: KL ${number(point.x)}, reward ${number(point.y)}`);
  }
}

/** A job's mark: its shape tells it from the others where colours do not. */
function shape(cloud, x, y, size, name) {
  return svg("path", { d: SHAPES[cloud.colour % SHAPES.length], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size})`, class: name });
}
