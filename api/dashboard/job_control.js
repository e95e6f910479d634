/* Steering a job: pause, resume, cancel, and changes of beta, target and learning rate with the step they take effect at. */

import { ApiError, control, jobs } from "./api.js";
import { announce, button, confirmed, fill, h, notice, setText, uniqueId } from "./dom.js";
import { number, time, toNumber } from "./format.js";
import { bandOf, title } from "./names.js";

const LARGE_FACTOR = 5;

/** Pause, resume and cancel; whichever the job's status allows. */
export class ActionButtons {
  constructor(getJob, onChanged) {
    this.getJob = getJob;
    this.onChanged = onChanged;
    this.message = h("div", {});
    this.pause = button("Pause", () => this.#act("pause", "The job finishes its step, saves a checkpoint and frees its slot."));
    this.resume = button("Resume", () => this.#act("resume", "The job is queued again and goes on from its checkpoint."));
    this.cancel = button("Cancel …", () => this.#cancel(), { class: "danger" });
    this.element = h("div", { class: "row", role: "group", "aria-label": "Control of the job" }, this.pause, this.resume, this.cancel);
  }

  update(job) {
    const isPausing = job.phase === "pausing" || job.phase === "cancelling";
    this.pause.hidden = !["queued", "running"].includes(job.status);
    this.pause.disabled = isPausing;
    this.resume.hidden = !(job.status === "paused" || job.phase === "pausing");
    this.cancel.hidden = job.is_terminal;
    this.cancel.disabled = job.phase === "cancelling";
  }

  async #act(verb, sentence) {
    try {
      await jobs.act(this.getJob().id, verb);
      fill(this.message, notice("info", "", sentence));
      announce(sentence);
      await this.onChanged();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      fill(this.message, notice("error", `The job could not be ${verb === "cancel" ? "cancelled" : `${verb}d`}.`, error.message));
    }
  }

  async #cancel() {
    const job = this.getJob();
    const text = `“${title(job)}” is at step ${job.progress.step} of ${job.progress.num_steps}. It ends at once, without a further checkpoint, and cannot be taken up again. Pausing keeps the work.`;
    if (await confirmed("Cancel this job?", text, "Cancel the job")) await this.#act("cancel", "The job is being cancelled.");
  }
}

const FIELDS = {
  beta: { label: "β", hint: "The new base; an adaptive rule goes on from it." },
  target: { label: "Target KL", hint: "What the rule steers towards, in its unit." },
  learning_rate: { label: "Learning rate", hint: "From the next step on." },
};

/** A form for live changes, and every change asked for so far. */
export class ControlPanel {
  constructor(getJob) {
    this.getJob = getJob;
    this.message = h("div", {});
    this.inputs = {};
    this.now = {};
    this.fields = Object.entries(FIELDS).map(([name, field]) => this.#field(name, field));
    this.submit = h("button", { type: "submit", class: "primary" }, "Apply at the next step");
    this.form = h("form", { on: { submit: (event) => { event.preventDefault(); this.#apply(); } } },
      h("div", { class: "fields" }, this.fields), h("div", { class: "row end" }, this.submit));
    this.closed = h("p", { class: "soft", hidden: true });
    this.list = h("ol", { class: "events", reversed: true, tabindex: "0", "aria-label": "Changes asked for, newest first" });
    this.element = h("section", { class: "panel", "aria-labelledby": "control-title" },
      h("h2", { id: "control-title" }, "Control"), this.message, this.closed, this.form, h("h3", {}, "Changes"), this.list);
  }

  /** Read the settings and the changes again. */
  async load(signal) {
    const job = this.getJob();
    try {
      const { settings, etag } = await control.get(job.id, signal);
      this.etag = etag;
      this.settings = settings;
      for (const name of Object.keys(FIELDS)) setText(this.now[name], `now ${number(settings[name])}`);
      this.#showCommands(settings.commands);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      fill(this.message, notice("error", "The settings could not be read.", error.message));
    }
    this.update(job);
  }

  get isWaiting() { return this.settings?.commands.some((command) => command.status === "pending") ?? false; }

  update(job) {
    this.form.hidden = job.is_terminal;
    this.closed.hidden = !job.is_terminal;
    setText(this.closed, job.is_terminal ? "The job has ended, so nothing can be changed any more." : "");
    this.fields[1].hidden = bandOf(job.resolved.beta) === null;
  }

  #field(name, { label, hint }) {
    const id = uniqueId(name);
    const input = h("input", { id, inputmode: "decimal", autocomplete: "off", "aria-describedby": `${id}-hint`, placeholder: "unchanged", on: { input: () => this.#clear(name) } });
    this.inputs[name] = input;
    this.now[name] = h("span", {}, "now –");
    this[`${name}Error`] = h("p", { class: "error", id: `${id}-error`, hidden: true });
    return h("div", { class: "field" }, h("label", { for: id }, label), input,
      h("p", { class: "hint", id: `${id}-hint` }, this.now[name], `. ${hint}`), this[`${name}Error`]);
  }

  #clear(name) { this.#complain(name, ""); }

  #complain(name, text) {
    const input = this.inputs[name];
    const error = this[`${name}Error`];
    error.hidden = !text;
    setText(error, text);
    if (text) { input.setAttribute("aria-invalid", "true"); input.setAttribute("aria-errormessage", error.id); input.focus(); } else { input.removeAttribute("aria-invalid"); input.removeAttribute("aria-errormessage"); }
  }

  /** The numbers typed in; null when one of them is none. */
  #read() {
    const change = {};
    for (const [name, input] of Object.entries(this.inputs)) {
      const text = input.value.trim().replace(",", ".");
      if (text === "") continue;
      const value = Number(text);
      if (!Number.isFinite(value)) {
        this.#complain(name, `“${input.value}” is not a number; write it like 0.02 or 1e-6.`);
        return null;
      }
      change[name] = value;
    }
    if (Object.keys(change).length) return change;
    this.#complain("beta", "Enter at least one new value.");
    return null;
  }

  async #apply() {
    const change = this.#read();
    if (!change || !(await this.#isMeant(change))) return;
    try {
      const command = await control.change(this.getJob().id, change, this.etag);
      for (const input of Object.values(this.inputs)) input.value = "";
      fill(this.message);
      announce(`Change number ${command.number} was sent; it takes effect at the next step boundary.`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const field = this.inputs[error.param] ? error.param : null;
      if (field) this.#complain(field, error.message);
      else fill(this.message, notice("error", error.status === 412 ? "Somebody else changed the settings meanwhile." : "The change was not accepted.",
        error.status === 412 ? "The values below are the new ones; look at them and apply again." : error.message));
    }
    await this.load();
  }

  /** Ask again before a change that is likely to be a slip. */
  async #isMeant(change) {
    const reasons = Object.entries(change).map(([name, value]) => {
      const now = toNumber(this.settings?.[name]);
      if (name === "beta" && value === 0) return "β 0 switches the KL penalty off.";
      if (!now || !value) return null;
      const factor = Math.max(value / now, now / value);
      return factor >= LARGE_FACTOR ? `${FIELDS[name].label} goes from ${number(now)} to ${number(value)}, ${number(factor, 2)} times ${value > now ? "as much" : "less"}.` : null;
    }).filter(Boolean);
    return reasons.length === 0 || confirmed("Is this change meant?", reasons.join(" "), "Apply it");
  }

  #showCommands(commands) {
    const sorted = [...commands].sort((a, b) => b.number - a.number);
    fill(this.list, sorted.length ? sorted.map((command) => this.#command(command)) : h("li", { class: "soft" }, "None asked for yet."));
  }

  #command(command) {
    const what = Object.keys(FIELDS).filter((name) => command[name] !== null && command[name] !== undefined)
      .map((name) => `${FIELDS[name].label} ${number(command[name])}`).join(", ");
    const state = {
      pending: "waits for the next step boundary", applied: `in effect from step ${command.effective_step}`,
      refused: `refused: ${command.reason ?? "no reason given"}`, void: `no longer applies${command.reason ? `: ${command.reason}` : ""}`,
    }[command.status];
    return h("li", { class: command.status === "refused" ? "warn" : "info", dataset: { command: command.number } },
      h("div", { class: "soft" }, `${command.number} · ${time(command.created_at)} · ${command.actor}`), h("strong", {}, what || "checkpoint"), `: ${state}`);
  }
}
