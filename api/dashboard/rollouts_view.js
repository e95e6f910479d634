/* What the policy wrote at a step: completions with rewards, grader parts and KL by token. Everything chosen is in the address. */

import { ApiError, jobs } from "./api.js";
import { announce, button, fill, h, notice, setText } from "./dom.js";
import { count, number, toNumber } from "./format.js";
import { title } from "./names.js";
import { RolloutDetail } from "./rollout_detail.js";
import { choose, ORDERS, RolloutList } from "./rollout_list.js";
import { classesOf, scaleLegend } from "./rollout_tokens.js";
import { typedNumber } from "./schema.js";
import { options } from "./schema_form.js";

const PAGE = 100;
const MOST = 1000;
const REFRESH_MS = 5000;

export function show(root, params, page) {
  const view = new RolloutsView(root, params, page);
  view.open();
  return () => view.dispose();
}

class RolloutsView {
  constructor(root, params, page) {
    Object.assign(this, { root, page, id: params.get("id") });
    this.step = wholeNumber(params.get("step"));
    this.index = (wholeNumber(params.get("completion")) ?? 0) - 1;
    this.order = ORDERS[params.get("order")] ? params.get("order") : "sampled";
    this.bounds = { from: params.get("from") ?? "", to: params.get("to") ?? "" };
    this.against = params.get("against");
    this.abort = new AbortController();
    this.all = [];
  }

  dispose() {
    this.abort.abort();
    this.reading?.abort();
    clearTimeout(this.timer);
  }

  async open() {
    try {
      this.job = await jobs.get(this.id, this.abort.signal);
    } catch (error) {
      this.#failed(error, this.root, "The completions cannot be shown.");
      return;
    }
    this.#build();
    await this.#read();
    this.#watch();
  }

  /** The step every completion of which is kept, as the job's settings say. */
  get every() { return this.job.resolved.telemetry?.rollouts_every ?? 1; }

  #build() {
    this.page.setTitle(`Rollouts of ${title(this.job)}`);
    this.stepBox = h("input", { id: "rollout-step", inputmode: "numeric", size: "8", autocomplete: "off", "aria-describedby": "rollout-where", on: { change: () => this.#typedStep() } });
    this.earlier = button("◂ Earlier", () => this.#go(this.step - this.every), { "aria-label": "Earlier step" });
    this.later = button("Later ▸", () => this.#go(this.step + this.every), { "aria-label": "Later step" });
    this.latest = button("Latest", () => this.#go(null));
    this.where = h("p", { class: "soft", id: "rollout-where" });
    this.message = h("div", {});
    this.summary = h("p", { class: "soft", role: "status" });
    this.legend = h("div", {});
    this.sorter = h("select", { id: "rollout-order", on: { change: () => { this.order = this.sorter.value; this.#list(); } } });
    options(this.sorter, Object.entries(ORDERS).map(([value, [text]]) => [value, text]), this.order);
    this.boxes = Object.fromEntries(["from", "to"].map((side) => [side, h("input", {
      id: `reward-${side}`, inputmode: "decimal", size: "6", autocomplete: "off", value: this.bounds[side], placeholder: "any", on: { input: () => { this.bounds[side] = this.boxes[side].value; this.#list(); } },
    })]));
    this.list = new RolloutList((one) => { this.#show(one); this.detail.element.scrollIntoView({ block: "nearest" }); });
    this.detail = new RolloutDetail((against) => { this.against = against; this.#remember(); });
    this.previous = button("◂ Previous", () => this.#move(-1), { class: "small", "aria-label": "Previous completion" });
    this.next = button("Next ▸", () => this.#move(1), { class: "small", "aria-label": "Next completion" });
    this.content = h("div", { class: "rollout-pair" },
      h("div", {}, h("div", { class: "row pager" }, this.previous, this.next, this.summary), this.list.element), this.detail.element);
    fill(this.root,
      h("div", { class: "titlebar" }, h("h1", {}, "Rollouts of ", h("a", { href: `#/jobs/${this.id}` }, title(this.job)))),
      h("form", { class: "row filters", "aria-label": "Which completions", on: { submit: (event) => { event.preventDefault(); this.#typedStep(); } } },
        h("label", {}, "Step ", this.stepBox), this.earlier, this.later, this.latest,
        h("label", {}, "Order ", this.sorter), h("label", {}, "Reward from ", this.boxes.from), h("label", {}, "to ", this.boxes.to)),
      this.where, this.message, this.legend, this.content);
    this.#place();
  }

  /** Where the step lies among those of the job. */
  #place() {
    const { step: last } = this.job.progress;
    const { rollouts_keep: keep } = this.job.resolved.telemetry ?? {};
    this.stepBox.value = this.step === null ? "" : String(this.step);
    this.earlier.disabled = this.step === null || this.step - this.every < 1;
    this.later.disabled = this.step === null || this.step + this.every > last;
    const kept = this.every === 1 ? "each step" : `every ${this.every} steps`;
    setText(this.where, `The job is at step ${last.toLocaleString()} of ${this.job.progress.num_steps.toLocaleString()}. It keeps ${kept}${keep ? `, the latest ${keep.toLocaleString()}` : ""}.`);
  }

  #typedStep() {
    const step = wholeNumber(this.stepBox.value);
    if (step === null || step < 1) {
      this.stepBox.setAttribute("aria-invalid", "true");
      fill(this.message, notice("warn", "", `“${this.stepBox.value}” is no step; write a whole number from 1 on.`));
      return;
    }
    if (step !== this.step || !this.all.length) this.#go(step);
  }

  #go(step) {
    this.step = step;
    this.index = -1;
    return this.#read();
  }

  /** Fetch the step's completions, page by page. */
  async #read() {
    this.reading?.abort();
    this.reading = new AbortController();
    const { signal } = this.reading;
    this.stepBox.removeAttribute("aria-invalid");
    fill(this.message);
    try {
      const found = [];
      let answer;
      do {
        answer = await jobs.rollouts(this.id, { step: this.step, after: found.at(-1)?.index, limit: PAGE }, signal);
        this.step = answer.step;
        found.push(...answer.data);
        setText(this.summary, `Reading ${found.length} of ${answer.num_completions} …`);
      } while (answer.has_more && found.length < MOST);
      this.all = found;
      this.total = answer.num_completions;
    } catch (error) {
      if (error.name === "AbortError") return;
      this.all = [];
      this.content.hidden = true;
      fill(this.legend);
      this.#place();
      this.#remember();
      this.#failed(error, this.message, this.#sentence(error));
      return;
    }
    this.content.hidden = false;
    this.scale = classesOf(this.all.flatMap((one) => (one.token_kl ?? []).map(toNumber)));
    fill(this.legend, scaleLegend(this.scale));
    this.#place();
    this.#list();
  }

  #sentence(error) {
    if (error.code !== "rollouts_not_kept") return "The completions could not be read.";
    if (this.job.resolved.telemetry?.rollouts_every === null) return "This job keeps no completions (telemetry.rollouts_every is null).";
    return this.job.progress.step === 0 ? "No step is complete yet; come back after the first." : "Nothing to show for this step.";
  }

  /** Draw the list anew, and keep showing what was shown if it is still in it. */
  #list() {
    const bound = { from: this.#bound("from"), to: this.#bound("to") };
    this.chosen = choose(this.all, { order: this.order, ...bound });
    this.list.show(this.chosen, this.order);
    const more = this.total > this.all.length ? ` The first ${this.all.length.toLocaleString()} of ${this.total.toLocaleString()} were read.` : "";
    const rewards = this.chosen.map((one) => toNumber(one.reward)).filter(Number.isFinite);
    const mean = rewards.length ? `, mean reward ${number(rewards.reduce((sum, value) => sum + value, 0) / rewards.length, 3)}` : "";
    setText(this.summary, this.chosen.length === this.all.length ? `${count(this.all.length, "completion")}${mean}.${more}` : `${this.chosen.length} of ${count(this.all.length, "completion")}${mean}.${more}`);
    this.detail.element.hidden = this.chosen.length === 0;
    if (!this.chosen.length) fill(this.list.element, h("li", { class: "soft" }, "No completion has such a reward; widen the filter."));
    this.#show(this.chosen.find((one) => one.index === this.index) ?? this.chosen[0]);
  }

  #bound(side) {
    const value = typedNumber(this.bounds[side]);
    const isWrong = typeof value === "string";
    if (isWrong) this.boxes[side].setAttribute("aria-invalid", "true");
    else this.boxes[side].removeAttribute("aria-invalid");
    return typeof value === "number" ? value : null;
  }

  #move(by) {
    const at = this.chosen.findIndex((one) => one.index === this.index);
    const one = this.chosen[at + by];
    if (!one) return;
    this.#show(one);
    announce(`Completion ${one.index + 1}, reward ${number(one.reward, 3)}.`);
  }

  #show(one) {
    const at = one ? this.chosen.indexOf(one) : -1;
    this.previous.disabled = at <= 0;
    this.next.disabled = at < 0 || at === this.chosen.length - 1;
    if (one) {
      this.index = one.index;
      this.detail.show(one, this.all.filter((other) => other.row === one.row), this.scale, this.against, whyNoAnswer(this.job.resolved, this.step));
      this.list.mark(one.index);
    }
    this.#remember();
  }

  #remember() {
    const values = { step: this.step, completion: this.index < 0 ? null : this.index + 1, order: this.order === "sampled" ? null : this.order, ...this.bounds, against: this.against };
    const given = Object.entries(values).filter(([, value]) => value !== null && value !== "");
    history.replaceState(null, "", `#/jobs/${this.id}/rollouts${given.length ? `?${new URLSearchParams(given)}` : ""}`);
  }

  /** How far the job is, while it runs; what is read stays as it is. */
  async #watch() {
    if (this.abort.signal.aborted || this.job.is_terminal) return;
    this.timer = setTimeout(async () => {
      try {
        if (!document.hidden) this.job = await jobs.get(this.id, this.abort.signal);
        if (document.activeElement !== this.stepBox) this.#place();
      } catch (error) {
        if (error.name === "AbortError") return;
        this.#failed(error, this.message, "How far the job is could not be read.");
        if (error.kind === "key") return;
      }
      this.#watch();
    }, REFRESH_MS);
  }

  #failed(error, place, sentence) {
    if (error.name === "AbortError") return;
    if (!(error instanceof ApiError)) throw error;
    this.page.failed(error, place, sentence);
  }
}

/** Why the reference's answer is not there, and how to get it. */
function whyNoAnswer({ telemetry, beta, kl }, step) {
  const every = telemetry?.rollouts_reference_every ?? null;
  if (every !== null) return `The reference is asked every ${every.toLocaleString()} steps (telemetry.rollouts_reference_every), not at step ${step.toLocaleString()}.`;
  const reference = !kl?.monitor && !(beta?.rule !== "fixed" || beta?.value > 0) ? " and kl.monitor to true, since beta is 0" : "";
  return `The reference’s own answers are not kept by this job. In a new job or a fork set telemetry.rollouts_reference_every to 10${reference}: every tenth step the reference then answers the same prompts. Until then, compare with another completion of the prompt.`;
}

function wholeNumber(text) {
  return /^\d{1,9}$/.test(String(text ?? "").trim()) ? Number(text) : null;
}
