/* Several jobs side by side: any metric over steps, and reward against KL. */

import { ApiError, jobs } from "./api.js";
import { Chart, ChartGroup } from "./chart.js";
import { fill, h, notice, setText } from "./dom.js";
import { number, toNumber } from "./format.js";
import { klName, ruleSentence, STATUS_WORDS, title } from "./names.js";
import { Scatter } from "./scatter.js";
import { fromBuckets } from "./series.js";

const BUCKETS = 160;
const REFRESH_MS = 5000;
const MOST = 6;
const CHARTS = [
  { id: "kl", title: "KL to the reference", unit: "nats/token", canLog: true, name: klName },
  { id: "beta", title: "β", unit: "", canLog: true, isStepped: true, name: () => "beta/applied" },
  { id: "reward", title: "Reward", unit: "", name: () => "reward/mean" },
  { id: "entropy", title: "Entropy", unit: "nats/token", name: () => "policy/entropy" },
  { id: "length", title: "Completion length", unit: "tokens", name: () => "completion/length_mean" },
];

export function show(root, params, page) {
  const view = new CompareView(root, params, page);
  view.open();
  return () => view.dispose();
}

class CompareView {
  constructor(root, params, page) {
    Object.assign(this, { root, page });
    this.chosen = (params.get("jobs") ?? "").split(",").filter(Boolean).slice(0, MOST);
    this.abort = new AbortController();
    this.data = new Map();
    this.charts = [];
  }

  dispose() {
    this.abort.abort();
    clearTimeout(this.timer);
    for (const chart of this.charts) chart.dispose();
    this.scatter?.dispose();
  }

  async open() {
    try {
      this.jobs = (await jobs.list({ limit: 100 }, this.abort.signal)).data;
      const known = new Set(this.jobs.map((job) => job.id));
      for (const id of this.chosen.filter((id) => !known.has(id))) this.jobs.push(await jobs.get(id, this.abort.signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.page.failed(error, this.root, "The jobs cannot be compared.");
      return;
    }
    this.#build();
    await this.#loop();
  }

  #build() {
    this.group = new ChartGroup();
    this.charts = CHARTS.map((definition) => new Chart(this.group, { ...definition, empty: "Choose jobs above." }));
    this.scatter = new Scatter({ title: "Reward against KL", description: "Each point is a stretch of steps; the ring marks the latest. Up and to the left is better." });
    this.message = h("div", {});
    this.boxes = this.jobs.map((job) => {
      const box = h("input", { type: "checkbox", checked: this.chosen.includes(job.id), on: { change: () => this.#choose(job.id, box) } });
      return h("label", { class: "choice" }, box, h("span", {}, title(job)), h("span", { class: "soft" }, `${STATUS_WORDS[job.status]}, ${job.resolved.beta.rule}`));
    });
    this.table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The jobs in numbers" });
    fill(this.root, h("h1", {}, "Compare"),
      this.jobs.length === 0 ? h("div", { class: "empty" }, h("p", {}, "No jobs yet, so there is nothing to compare."), h("a", { class: "button primary", href: "#/new" }, "New job")) : null,
      h("fieldset", { hidden: this.jobs.length === 0 }, h("legend", {}, `Jobs, up to ${MOST}`), h("div", { class: "choices" }, this.boxes)),
      this.message, h("h2", { class: "visually-hidden" }, "Curves"), h("div", { class: "charts" }, this.charts[0].element, this.scatter.element, this.charts.slice(1).map((chart) => chart.element)),
      h("section", { class: "panel below" }, h("h2", {}, "In numbers"), this.table));
  }

  #choose(id, box) {
    if (box.checked && this.chosen.length >= MOST) {
      box.checked = false;
      fill(this.message, notice("warn", "", `${MOST} jobs at most; take one away first.`));
      return;
    }
    fill(this.message);
    this.chosen = box.checked ? [...this.chosen, id] : this.chosen.filter((other) => other !== id);
    history.replaceState(null, "", `#/compare${this.chosen.length ? `?jobs=${this.chosen.join(",")}` : ""}`);
    this.#refresh();
  }

  async #loop() {
    if (!document.hidden) await this.#refresh();
    if (!this.abort.signal.aborted) this.timer = setTimeout(() => this.#loop(), REFRESH_MS);
  }

  /** Fetch what is missing or has moved on, one job after the other. */
  async #refresh() {
    try {
      for (const id of [...this.chosen]) {
        const job = await jobs.get(id, this.abort.signal);
        const had = this.data.get(id);
        const isFresh = had && job.progress.step - had.job.progress.step < Math.max(1, job.progress.step / 50) && job.is_terminal === had.job.is_terminal;
        if (isFresh || job.progress.step === 0) {
          this.data.set(id, { series: had?.series ?? new Map(), job: had?.job ?? job });
          continue;
        }
        const names = CHARTS.map((chart) => chart.name(job)).join(",");
        const answer = await jobs.metrics(id, { names, resolution: BUCKETS }, this.abort.signal);
        this.data.set(id, { job, series: new Map(answer.data.map((item) => [item.name, { line: fromBuckets(item.buckets), buckets: item.buckets }])) });
        this.#draw();
      }
      this.#draw();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.page.failed(error, this.message, "The curves could not be read.");
    }
  }

  #draw() {
    const shown = this.chosen.map((id, index) => ({ ...this.data.get(id), colour: index })).filter(({ job }) => job);
    const last = Math.max(2, ...shown.map(({ job }) => job.progress.step));
    CHARTS.forEach((definition, place) => {
      const lines = shown.map(({ job, series, colour }) => ({ label: title(job), title: job.id, colour, dash: colour, isStepped: definition.isStepped, series: series.get(definition.name(job))?.line }));
      this.charts[place].setData({ lines: lines.filter((line) => line.series) });
    });
    this.group.setExtent(1, last);
    this.scatter.setData(shown.map(({ job, series, colour }) => ({ label: title(job), colour, points: pairs(series.get(klName(job)), series.get("reward/mean")) })));
    this.#fillTable(shown);
  }

  #fillTable(shown) {
    if (!shown.length) return void fill(this.table, h("p", { class: "soft" }, "Choose jobs above, or tick them in the list of jobs."));
    const last = (series, name) => number(series.get(name)?.line.last ?? null);
    const head = ["Job", "Status", "Step", "KL", "β", "Reward", "β rule"];
    return void fill(this.table, h("table", {}, h("thead", {}, h("tr", {}, head.map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, shown.map(({ job, series }) => h("tr", {}, h("th", { scope: "row" }, h("a", { href: `#/jobs/${job.id}` }, title(job))),
        h("td", {}, STATUS_WORDS[job.status]), h("td", {}, job.progress.step.toLocaleString()), h("td", {}, last(series, klName(job))),
        h("td", {}, last(series, "beta/applied")), h("td", {}, last(series, "reward/mean")), h("td", {}, ruleSentence(job.resolved.beta)))))));
  }
}

/** Points (KL, reward, step) at the steps both were measured; the ends of the buckets. */
function pairs(kl, reward) {
  if (!kl || !reward) return [];
  const rewards = new Map(reward.buckets.map((bucket) => [bucket.last.step, toNumber(bucket.last.value)]));
  return kl.buckets.map((bucket) => ({ x: toNumber(bucket.last.value), y: rewards.get(bucket.last.step), step: bucket.last.step }))
    .filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y));
}
