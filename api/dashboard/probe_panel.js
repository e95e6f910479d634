/* What a job would cost and look like, tried on a worker before it is created: the first step, without an update. */

import { ApiError, jobs } from "./api.js";
import { announce, button, fill, h, notice, setText } from "./dom.js";
import { bytes, count, duration, number } from "./format.js";

const KINDS = { process: "main memory", cuda: "GPU memory" };

/** `getSpec()` is the job as it is written; `onRefused(error)` gets what the server says about a field. */
export class ProbePanel {
  constructor(getSpec, onRefused) {
    Object.assign(this, { getSpec, onRefused });
    this.ask = button("Try its first step", () => this.#ask(), { disabled: true });
    this.cancel = button("Stop waiting", () => this.stop(), { hidden: true });
    this.state = h("p", { class: "hint", role: "status" }, "A worker samples, grades and measures step 1 without changing a weight: memory, seconds, KL and how much there is to learn from.");
    this.result = h("div", {});
    this.element = h("section", { class: "panel section", "aria-labelledby": "probe-title" },
      h("h2", { id: "probe-title" }, "Before you start it"), h("div", { class: "row" }, this.ask, this.cancel), this.state, this.result);
  }

  /** The job is one the server would accept. */
  ready() {
    this.isReady = true;
    this.ask.disabled = Boolean(this.asking);
  }

  /** The job was changed: what was found is about another one. */
  outdated() {
    this.isReady = false;
    this.ask.disabled = true;
    if (this.asking) this.stop();
    if (this.result.hasChildNodes() && !this.isOld) {
      this.isOld = true;
      setText(this.state, "The job was changed since; these numbers are about what it was before.");
    }
  }

  stop() {
    this.asking?.abort();
  }

  async #ask() {
    const asking = (this.asking = new AbortController());
    this.ask.disabled = true;
    this.cancel.hidden = false;
    this.isOld = false;
    fill(this.result);
    const began = Date.now();
    const tell = () => setText(this.state, `A worker is trying the first step: ${duration((Date.now() - began) / 1000)} so far. Loading the model is part of it.`);
    tell();
    const clock = setInterval(tell, 1000);
    try {
      const { probe } = await jobs.probe(this.getSpec(), asking.signal);
      setText(this.state, "");
      fill(this.result, report(probe));
      announce(`Step 1 takes ${duration(probe.seconds.step)}; the whole job about ${duration(probe.estimated_seconds)}.`);
    } catch (error) {
      if (error.name === "AbortError") setText(this.state, "Not tried.");
      else if (error instanceof ApiError) {
        setText(this.state, "");
        fill(this.result, notice(error.kind === "conflict" ? "warn" : "error", "The first step could not be tried.", error.message));
        this.onRefused(error);
      } else throw error;
    } finally {
      clearInterval(clock);
      this.asking = null;
      this.ask.disabled = !this.isReady;
      this.cancel.hidden = true;
    }
  }
}

function report(probe) {
  const { seconds, memory, kl } = probe;
  const share = (value) => (value === null ? "–" : `${number(100 * value, 3)} %`);
  const tiles = [
    ["Memory", bytes(memory.peak_bytes), `${KINDS[memory.kind]}${memory.total_bytes ? `, of ${bytes(memory.total_bytes)}` : ""}`],
    ["A step", `${number(seconds.step, 3)} s`, phases(seconds)],
    ["Whole job", duration(probe.estimated_seconds), `${count(probe.num_steps, "step")}, without waiting in the queue`],
    ["KL at step 1", kl ? number(kl.value) : "–", kl ? `nats per token, ${kl.estimator}` : "not measured"],
    ["Reward", number(probe.reward_mean), `± ${number(probe.reward_std, 3)} over completions`],
    ["Equal groups", share(probe.zero_variance_share), "nothing to learn from"],
    ["Cut off", share(probe.truncated_share), `mean length ${number(probe.mean_completion_tokens, 3)} tokens`],
    ["Not graded", share(probe.failed_share), "of the completions"],
  ];
  return [
    h("dl", { class: "tiles" }, tiles.map(([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("span", {}, value), h("small", {}, note))))),
    probe.warnings.length ? notice("warn", count(probe.warnings.length, "warning"), h("ul", {}, probe.warnings.map((warning) => h("li", {}, warning.message)))) : null,
    h("p", { class: "soft" }, `On ${probe.worker ?? "a worker"}, ${probe.device} in ${probe.precision}, ${probe.parameters.toLocaleString()} parameters. ${probe.is_whole_step ? "" : `Tried with ${probe.groups_probed} of ${probe.groups_per_step} prompts a step and scaled up.`}`),
    probe.samples.length ? h("details", {}, h("summary", {}, "What it wrote"), probe.samples.map(sample)) : null,
  ];
}

function phases({ sampling, grading, reference, update, load }) {
  const parts = [["sampling", sampling], ["grading", grading], ["reference", reference], ["update", update]].filter(([, value]) => value !== null);
  return `${parts.map(([name, value]) => `${name} ${number(value, 2)}`).join(", ")}; once ${number(load, 2)} s to load`;
}

function sample(one) {
  return h("div", { class: "below" }, h("div", { class: "soft" }, `Row ${one.row + 1}, reward ${number(one.reward)}${one.is_truncated ? ", cut off" : ""}`),
    h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": `Prompt and completion of row ${one.row + 1}` }, one.prompt, h("ins", {}, one.completion)));
}
