/* A new job: written in a form or as JSON, checked by the server while it is written, tried before it is started. */

import { ApiError, jobs, onceKey } from "./api.js";
import { Composer } from "./composer.js";
import { announce, button, fill, h, notice, setText } from "./dom.js";
import { bytes, count } from "./format.js";
import { ProbePanel } from "./probe_panel.js";
import { choices, SpecEditor, startingSpec } from "./spec_editor.js";

export function show(root, params, page) {
  const view = new NewJobView(root, params, page);
  view.open();
  return () => view.dispose();
}

class NewJobView extends Composer {
  keyFor = onceKey();
  refusal = "A job cannot be composed now.";

  dispose() {
    super.dispose();
    this.probe?.stop();
  }

  async load(signal) {
    const [found, origin] = await Promise.all([choices(signal), this.from ? jobs.get(this.from, signal) : null]);
    this.document = startingSpec(origin, found.files);
    return found;
  }

  build(found) {
    this.editor = new SpecEditor(found, this.document, { onChange: () => this.changed(), onBroken: () => this.invalidate() });
    this.verdict = h("div", { role: "status" });
    this.resolved = h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "The job as it would run" });
    this.probe = new ProbePanel(() => this.document, (error) => this.editor.complain(error.param, error.message));
    this.create = button("Create the job", () => this.#create(), { class: "primary", disabled: true });
    fill(this.root,
      h("div", { class: "titlebar" }, h("h1", {}, "New job"), this.editor.tabs),
      h("p", { class: "hint" }, "Only what you set is sent; an empty field keeps the default shown in it. The server checks every change as you make it."),
      this.editor.element,
      h("details", { class: "group" }, h("summary", {}, "The job as it would run, after presets and defaults"), this.resolved),
      this.probe.element,
      h("div", { class: "verdict row" }, h("div", { class: "grow" }, this.verdict), this.create));
  }

  invalidate() {
    super.invalidate();
    this.probe?.outdated();
  }

  async check(signal) {
    try {
      const answer = await jobs.validate(this.document, signal);
      this.editor.complain(null, "");
      const disk = answer.disk_bytes_needed === null ? "" : `, up to ${bytes(answer.disk_bytes_needed)} for checkpoints`;
      fill(this.verdict, h("strong", {}, "The server would accept this job: "), `${count(answer.rows, "usable row")}${disk}.`, answer.warnings.map((warning) => h("div", { class: "alarm" }, `⚑ ${warning.message}`)));
      this.probe.ready();
      setText(this.resolved, JSON.stringify(answer.resolved, null, 2));
      this.create.disabled = false;
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.create.disabled = true;
      if (error.kind === "key") return void this.page.failed(error, this.root, "");
      this.editor.complain(error.param, error.message);
      fill(this.verdict, h("strong", { class: "complaint" }, "Not yet: "), error.message);
    }
  }

  async #create() {
    this.create.disabled = true;
    try {
      const job = await jobs.create(this.document, this.keyFor(this.document));
      announce("The job was created.");
      location.hash = `#/jobs/${job.id}`;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      fill(this.verdict, notice("error", "The job was not created.", error.message));
      this.create.disabled = false;
    }
  }
}
