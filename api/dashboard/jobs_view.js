/* The list of jobs: filter, search, progress, sparklines. Refreshes by itself without disturbing what is being read. */

import { ApiError, jobs } from "./api.js";
import { append, button, fill, h, notice, setText } from "./dom.js";
import { ago, count, duration, number } from "./format.js";
import { klName, STATUS_WORDS, title } from "./names.js";
import { fromBuckets } from "./series.js";
import { sparkline } from "./spark.js";

const REFRESH_MS = 4000;
const PAGE = 50;
const SPARK_POINTS = 40;
const LABELS = { kl: "KL", beta: "β", reward: "Reward" };

export function show(root, params, page) {
  const view = new JobsView(root, params, page);
  return () => view.dispose();
}

class JobsView {
  constructor(root, params, page) {
    this.page = page;
    this.abort = new AbortController();
    this.rows = new Map();
    this.selected = new Set();
    this.status = params.get("status") ?? "";
    this.search = params.get("search") ?? "";
    this.limit = PAGE;
    this.queue = [];
    this.#build(root);
    this.#loop();
  }

  dispose() {
    this.abort.abort();
    clearTimeout(this.timer);
  }

  #build(root) {
    this.filter = h("select", { id: "status", on: { change: () => this.#filterChanged() } },
      h("option", { value: "" }, "any status"),
      Object.entries(STATUS_WORDS).map(([value, word]) => h("option", { value }, word)));
    this.filter.value = this.status;
    this.box = h("input", { id: "search", type: "search", value: this.search, placeholder: "name, id, model or label", on: { input: () => this.#searchChanged() } });
    this.compare = button("Compare", () => { location.hash = `#/compare?jobs=${[...this.selected].join(",")}`; }, { disabled: true });
    this.message = h("div", {});
    this.body = h("tbody", {});
    this.more = button("Show older jobs", () => { this.limit += PAGE; this.refresh(); }, { hidden: true });
    this.tally = h("p", { class: "soft", role: "status" });
    const head = ["", "Job", "Status", "Progress", LABELS.kl, LABELS.beta, LABELS.reward, "Created"];
    this.table = h("table", { class: "jobs" },
      h("caption", { class: "visually-hidden" }, "Training jobs, newest first"),
      h("thead", {}, h("tr", {}, head.map((text) => (text ? h("th", { scope: "col" }, text) : h("td", {}, h("span", { class: "visually-hidden" }, "Compare")))))),
      this.body);
    fill(root,
      h("div", { class: "titlebar" }, h("h1", {}, "Jobs"), h("a", { class: "button primary", href: "#/new" }, "New job")),
      h("form", { class: "row filters", role: "search", on: { submit: (event) => event.preventDefault() } },
        h("label", {}, "Status ", this.filter), h("label", { class: "grow" }, "Search ", this.box), this.compare),
      this.message, this.tally, this.table, this.more);
  }

  #filterChanged() {
    this.status = this.filter.value;
    this.#remember();
    this.refresh();
  }

  #searchChanged() {
    this.search = this.box.value;
    this.#remember();
    this.#render();
  }

  #remember() {
    const given = Object.entries({ status: this.status, search: this.search }).filter(([, value]) => value);
    history.replaceState(null, "", `#/jobs${given.length ? `?${new URLSearchParams(given)}` : ""}`);
  }

  async #loop() {
    if (!document.hidden) await this.refresh();
    if (!this.abort.signal.aborted) this.timer = setTimeout(() => this.#loop(), REFRESH_MS);
  }

  /** Read the list again; pages of 100 up to what is shown. */
  async refresh() {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    try {
      const found = [];
      let after = "";
      do {
        const wanted = Math.min(100, this.limit - found.length);
        const answer = await jobs.list({ limit: wanted, status: this.status, after }, this.abort.signal);
        found.push(...answer.data);
        after = answer.has_more ? answer.last_id : "";
      } while (after && found.length < this.limit);
      if (turn !== this.turn) return;
      this.jobs = found;
      this.more.hidden = !after;
      fill(this.message);
      this.#render();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.page.failed(error, this.message, "The list of jobs cannot be shown.");
    }
  }

  #matches(job) {
    const words = this.search.toLowerCase().split(/\s+/).filter(Boolean);
    const labels = Object.entries(job.metadata).map(([key, value]) => `${key}=${value}`);
    const text = [job.id, title(job), job.model, job.status, ...labels].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  #render() {
    if (!this.jobs) return;
    const shown = this.jobs.filter((job) => this.#matches(job));
    const rows = shown.map((job) => this.#row(job));
    const isSame = rows.length === this.body.children.length && rows.every((row, index) => this.body.children[index] === row.element);
    if (!isSame) this.body.replaceChildren(...rows.map((row) => row.element));
    this.table.hidden = shown.length === 0;
    setText(this.tally, shown.length ? count(shown.length, "job") : "");
    if (!shown.length) this.#sayEmpty();
    else if (this.message.querySelector(".empty")) fill(this.message);
  }

  #sayEmpty() {
    const isFiltered = this.status || this.search;
    fill(this.message, isFiltered
      ? h("div", { class: "empty" }, h("p", {}, "No job matches this filter."), button("Show all jobs", () => {
        this.filter.value = this.box.value = this.search = "";
        this.#filterChanged();
      }))
      : h("div", { class: "empty" }, h("p", {}, "No jobs yet. Upload a dataset and start the first one; its KL curve will appear here."),
        h("a", { class: "button primary", href: "#/new" }, "New job")));
  }

  #row(job) {
    let row = this.rows.get(job.id);
    if (!row) {
      row = new JobRow(job, (isChecked) => this.#select(job.id, isChecked));
      this.rows.set(job.id, row);
    }
    row.update(job);
    if (row.wantsSparks(job)) this.#enqueue(row, job);
    return row;
  }

  #select(id, isChecked) {
    if (isChecked) this.selected.add(id);
    else this.selected.delete(id);
    this.compare.disabled = this.selected.size === 0;
    setText(this.compare, this.selected.size ? `Compare ${this.selected.size}` : "Compare");
  }

  /** Curves are fetched two at a time, so that a long list does not crowd the server. */
  #enqueue(row, job) {
    row.sparkStep = job.progress.step;
    this.queue.push([row, job]);
    if (this.queue.length <= 2) this.#drain();
  }

  async #drain() {
    this.workers = (this.workers ?? 0) + 1;
    while (this.queue.length && !this.abort.signal.aborted) {
      const [row, job] = this.queue.shift();
      const names = { kl: klName(job), beta: "beta/applied", reward: "reward/mean" };
      try {
        const answer = await jobs.metrics(job.id, { names: Object.values(names).join(","), resolution: SPARK_POINTS }, this.abort.signal);
        const found = Object.fromEntries(answer.data.map((series) => [series.name, fromBuckets(series.buckets)]));
        for (const [part, name] of Object.entries(names)) row.draw(part, found[name], job);
      } catch (error) {
        if (error.name === "AbortError") return;
        if (!(error instanceof ApiError)) throw error;
        row.sparkStep = -1;
      }
    }
    this.workers -= 1;
  }
}

/** One line of the table, updated in place. */
class JobRow {
  constructor(job, onSelect) {
    this.sparkStep = -1;
    this.link = h("a", { href: `#/jobs/${job.id}` }, title(job));
    this.about = h("div", { class: "soft" }, title(job) === job.id ? job.model : `${job.model} · ${job.id}`);
    this.badge = h("span", { class: "badge" });
    this.phase = h("div", { class: "soft" });
    this.bar = h("progress", { max: 1, value: 0, "aria-label": `Progress of ${title(job)}` });
    this.steps = h("div", { class: "soft" });
    this.created = h("td", { class: "soft", dataset: { label: "Created" } });
    this.cells = Object.fromEntries(Object.entries(LABELS).map(([part, label]) => [part, h("td", { dataset: { label } }, h("span", { class: "soft" }, "–"))]));
    const box = h("input", { type: "checkbox", "aria-label": `Select ${title(job)} for comparison`, on: { change: () => onSelect(box.checked) } });
    this.element = h("tr", {},
      h("td", { class: "pick" }, box),
      h("th", { scope: "row" }, this.link, this.about),
      h("td", { dataset: { label: "Status" } }, this.badge, this.phase),
      h("td", { class: "progress", dataset: { label: "Progress" } }, this.bar, this.steps),
      Object.values(this.cells), this.created);
  }

  update(job) {
    this.badge.className = `badge ${job.status}`;
    setText(this.badge, STATUS_WORDS[job.status]);
    setText(this.phase, this.#note(job));
    const { step, num_steps: total, eta } = job.progress;
    this.bar.value = total ? step / total : 0;
    const left = eta && !job.is_terminal ? `, ${duration(eta - Date.now() / 1000)} left` : "";
    setText(this.steps, `${step.toLocaleString()} of ${total.toLocaleString()} steps${left}`);
    setText(this.created, ago(job.created_at));
  }

  #note(job) {
    if (job.queue) return job.queue.position === 1 ? "next in the queue" : `number ${job.queue.position} in the queue`;
    if (job.status === "failed") return job.error?.code ?? "";
    return job.status === "running" ? job.phase.replaceAll("_", " ") : "";
  }

  /** Curves are read anew when they are a fiftieth longer, or shorter. */
  wantsSparks(job) {
    const { step } = job.progress;
    return step > 0 && (this.sparkStep < 0 || step < this.sparkStep || step - this.sparkStep >= Math.max(1, step / 50));
  }

  draw(part, series, job) {
    if (!series) return;
    const target = part === "kl" && job.kl?.target ? Number(number(job.kl.target)) : null;
    const colour = { kl: 1, beta: 2, reward: 3 }[part];
    const isPerToken = job.resolved.beta.unit !== "sequence";
    append(fill(this.cells[part]), [sparkline(LABELS[part], series, { target: isPerToken ? target : null, colour })]);
  }
}
