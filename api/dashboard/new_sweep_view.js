/* A new sweep: shared settings, and members that each change something. Every member is checked by the server while it is written. */

import { ApiError, jobs, onceKey, sweeps } from "./api.js";
import { Composer } from "./composer.js";
import { announce, button, fill, h, notice, uniqueId } from "./dom.js";
import { bytes, count } from "./format.js";
import { title } from "./names.js";
import { options } from "./schema_form.js";
import { choices, SpecEditor, startingSpec } from "./spec_editor.js";
import { jobOf, Members } from "./sweep_members.js";

export function show(root, params, page) {
  const view = new NewSweepView(root, params, page);
  view.open();
  return () => view.dispose();
}

class NewSweepView extends Composer {
  keyFor = onceKey();
  refusal = "A sweep cannot be composed now.";

  async load(signal) {
    const [found, others, origin] = await Promise.all([choices(signal), jobs.list({ limit: 20 }, signal), this.from ? jobs.get(this.from, signal) : null]);
    this.document = startingSpec(origin, found.files);
    return { found, others: origin && !others.data.some(({ id }) => id === origin.id) ? [origin, ...others.data] : others.data };
  }

  build({ found, others }) {
    const [name, from] = [uniqueId("name"), uniqueId("from")];
    this.page.setTitle("New sweep");
    this.name = h("input", { id: name, autocomplete: "off", maxlength: "64" });
    const select = h("select", { id: from, on: { change: () => { location.hash = select.value ? `#/sweeps/new?from=${encodeURIComponent(select.value)}` : "#/sweeps/new"; } } });
    options(select, [["", "none: from scratch"], ...others.map((job) => [job.id, title(job)])], this.from ?? "");
    this.members = new Members(() => this.changed());
    this.editor = new SpecEditor(found, this.document, { onChange: () => this.changed(), onBroken: () => this.invalidate() });
    this.verdict = h("div", { role: "status" });
    this.create = button("Start the sweep", () => this.#create(), { class: "primary", disabled: true });
    fill(this.root,
      h("div", { class: "titlebar" }, h("h1", {}, "New sweep")),
      h("p", { class: "hint" }, "A sweep trains the same prompts in the same order with several settings and sets the results side by side. All members are accepted together, or none."),
      h("div", { class: "panel fields" },
        h("div", { class: "field" }, h("label", { for: name }, "Name of the sweep"), this.name),
        h("div", { class: "field" }, h("label", { for: from }, "Settings of a job"), select)),
      h("h2", { class: "section" }, "What the members change"), this.members.element,
      h("div", { class: "titlebar" }, h("h2", { class: "section" }, "What they share"), this.editor.tabs), this.editor.element,
      h("div", { class: "verdict row" }, h("div", { class: "grow" }, this.verdict), this.create));
  }

  /** Each member as far as it can be read; null where it cannot, which is said there. */
  #variants() {
    return this.members.all.map((member) => {
      try {
        return member.variant();
      } catch (error) {
        if (!(error instanceof SyntaxError)) throw error;
        member.say(`Not yet: ${error.message}.`, true);
        return null;
      }
    });
  }

  async check(signal) {
    this.editor.complain(null, "");
    const answers = await Promise.all(this.#variants().map((variant, at) => (variant === null ? null : this.#checked(variant, this.members.all[at], signal))));
    if (signal.aborted) return;
    const isGood = answers.every((answer) => answer !== null);
    if (isGood) {
      const needed = answers.map((answer) => answer.disk_bytes_needed);
      const disk = needed.includes(null) ? "" : `, up to ${bytes(needed.reduce((sum, value) => sum + value, 0))} for checkpoints`;
      fill(this.verdict, h("strong", {}, `The server would accept all ${answers.length} jobs: `), `${count(answers[0].rows, "usable row")}${disk}.`);
    } else fill(this.verdict, h("strong", { class: "complaint" }, "Not yet: "), "see the members above.");
    this.create.disabled = !isGood;
  }

  async #checked(variant, member, signal) {
    try {
      const answer = await jobs.validate(jobOf(this.document, variant), signal);
      member.say(["Would be accepted.", ...answer.warnings.map(({ message }) => `⚑ ${message}`)].join(" "), false);
      return answer;
    } catch (error) {
      if (error.name === "AbortError") return null;
      if (!(error instanceof ApiError)) throw error;
      if (error.kind === "key") this.page.failed(error, this.root, "");
      member.say(`Not yet: ${error.message}`, true);
      this.editor.complain(error.param, error.message);
      return null;
    }
  }

  async #create() {
    const variants = this.#variants();
    if (variants.includes(null)) return;
    const body = { name: this.name.value.trim() || null, spec: this.document, variants };
    this.create.disabled = true;
    try {
      const made = await sweeps.create(body, this.keyFor(body));
      announce("The sweep was started.");
      location.hash = `#/sweeps/${made.id}`;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const [, at] = /^variants\[(\d+)\]/.exec(error.param ?? "") ?? [];
      if (at !== undefined) this.members.all[Number(at)]?.say(error.message, true);
      else this.editor.complain((error.param ?? "").replace(/^spec\.?/, ""), error.message);
      fill(this.verdict, notice("error", "The sweep was not started.", error.message));
      this.create.disabled = false;
    }
  }
}
