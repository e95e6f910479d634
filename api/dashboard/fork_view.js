/* A fork: a new job from a checkpoint of another, with its settings but for those changed here. */

import { ApiError, json, jobs, onceKey } from "./api.js";
import { announce, button, fill, h, notice, setText, uniqueId } from "./dom.js";
import { number, time } from "./format.js";
import { ruleSentence, title } from "./names.js";
import { options, SchemaForm } from "./schema_form.js";

const OPEN = ["method.grpo.beta", "method.grpo.limits"];
const SKIP = ["method.grpo.preset"];

export function show(root, params, page) {
  const view = new ForkView(root, params, page);
  view.open();
  return () => view.abort.abort();
}

class ForkView {
  constructor(root, params, page) {
    Object.assign(this, { root, page, id: params.get("id"), wanted: params.get("checkpoint") });
    this.abort = new AbortController();
    this.overrides = {};
    this.keyFor = onceKey();
  }

  async open() {
    const { signal } = this.abort;
    try {
      const [job, answer, description] = await Promise.all([jobs.get(this.id, signal), jobs.checkpoints(this.id, { limit: 100 }, signal), json("/openapi.json", { signal })]);
      Object.assign(this, { job, checkpoints: answer.data, schemas: description.components.schemas });
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.page.failed(error, this.root, "This job cannot be forked now.");
      return;
    }
    this.#build();
  }

  #build() {
    const { job } = this;
    this.page.setTitle(`Fork of ${title(job)}`);
    const head = [h("div", { class: "titlebar" }, h("h1", {}, "Fork of ", h("a", { href: `#/jobs/${job.id}` }, title(job))))];
    if (!this.checkpoints.length) {
      fill(this.root, head, notice("warn", "There is nothing to fork from yet.", "The job has published no checkpoint. The last step is always published; method.grpo.checkpoints.every asks for more."),
        h("a", { class: "button", href: `#/new?from=${encodeURIComponent(job.id)}` }, "New job from these settings"));
      return;
    }
    const [from, suffix] = [uniqueId("checkpoint"), uniqueId("suffix")];
    this.select = h("select", { id: from, "aria-describedby": `${from}-hint`, on: { change: () => this.#changed() } });
    options(this.select, this.checkpoints.map((item) => [item.id, `step ${item.step_number}, KL ${number(item.metrics.ref_kl, 3)}, reward ${number(item.metrics.reward, 3)}, ${time(item.created_at)}`]),
      this.checkpoints.some((item) => item.id === this.wanted) ? this.wanted : this.checkpoints[0].id);
    this.fromHint = h("p", { class: "hint", id: `${from}-hint` });
    this.suffix = h("input", { id: suffix, autocomplete: "off", maxlength: "64", "aria-describedby": `${suffix}-hint`, on: { input: () => this.#changed() } });
    this.form = new SchemaForm({
      schemas: this.schemas, document: this.overrides, inherited: { method: { type: "grpo", grpo: job.resolved } }, onChange: () => this.#changed(), open: OPEN, skip: SKIP,
      sections: [["GrpoConfig", ["method", "grpo"]]],
    });
    this.verdict = h("div", { role: "status" });
    this.submit = button("Start the fork", () => this.#fork(), { class: "primary" });
    fill(this.root, head,
      h("p", { class: "hint" }, `A new job goes on from the checkpoint's weights and counts its own steps from 1. Everything is as in ${title(job)} but for what you set. ${ruleSentence(job.resolved.beta)} KL keeps being measured against the beginning of the line.`),
      h("div", { class: "panel fields" },
        h("div", { class: "field wide" }, h("label", { for: from }, "Checkpoint"), this.select, this.fromHint),
        h("div", { class: "field" }, h("label", { for: suffix }, "Suffix"), this.suffix, h("p", { class: "hint", id: `${suffix}-hint` }, "What the new job is called."))),
      h("h2", { class: "section" }, "What changes"), this.form.element,
      h("div", { class: "verdict row" }, h("div", { class: "grow" }, this.verdict), this.submit));
    this.#changed();
  }

  get #chosen() { return this.checkpoints.find((item) => item.id === this.select.value); }

  #changed() {
    const { step_number: step } = this.#chosen;
    setText(this.fromHint, `The fork starts from the weights after step ${step.toLocaleString()}: ${this.#chosen.id}.`);
    const changes = leaves(this.overrides.method?.grpo ?? {}).map(([path, value]) => `${path} = ${typeof value === "object" ? JSON.stringify(value) : value}`);
    fill(this.verdict, changes.length ? [h("strong", {}, "Changed: "), changes.join(", ")] : "Nothing is changed; the fork repeats the settings.");
  }

  async #fork() {
    const body = { checkpoint: this.select.value, overrides: this.overrides, suffix: this.suffix.value.trim() || null };
    this.submit.disabled = true;
    this.form.complain(null, "");
    try {
      const made = await jobs.fork(this.id, body, this.keyFor(body));
      announce("The fork was created.");
      location.hash = `#/jobs/${made.id}`;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.submit.disabled = false;
      if (error.kind === "key") return void this.page.failed(error, this.root, "");
      this.form.complain((error.param ?? "").replace(/^overrides\./, ""), error.message);
      fill(this.verdict, notice("error", "The fork was not made.", error.message));
    }
  }
}

/** Every value that is set, by its path. */
function leaves(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, value]];
  return Object.entries(value).flatMap(([key, inner]) => leaves(inner, path ? `${path}.${key}` : key));
}
