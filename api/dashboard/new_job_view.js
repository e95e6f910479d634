/* A new job: a form from the server's own schema, or JSON; checked by the server while it is written. */

import { ApiError, json, jobs, onceKey } from "./api.js";
import { announce, button, fill, h, notice, setText, uniqueId } from "./dom.js";
import { bytes, count } from "./format.js";
import { setAt, valueAt } from "./schema.js";
import { ProbePanel } from "./probe_panel.js";
import { options, SchemaForm } from "./schema_form.js";

const CHECK_AFTER_MS = 450;
const OPEN = ["method.grpo.grader", "method.grpo.beta", "method.grpo.limits", "method.grpo.sampling", "method.grpo.preset"];
const START = { model: "smollm2-135m-instruct", method: { type: "grpo", grpo: { grader: { type: "math" }, beta: { rule: "fixed", value: 0.02 } } } };

export function show(root, params, page) {
  const view = new NewJobView(root, params, page);
  view.open();
  return () => view.dispose();
}

class NewJobView {
  constructor(root, params, page) {
    Object.assign(this, { root, page, from: params.get("from") });
    this.abort = new AbortController();
    this.mode = "form";
    this.keyFor = onceKey();
  }

  dispose() {
    this.abort.abort();
    this.checking?.abort();
    this.probe?.stop();
    clearTimeout(this.timer);
  }

  async open() {
    const { signal } = this.abort;
    try {
      const [description, models, files, presets, origin] = await Promise.all([
        json("/openapi.json", { signal }), json("/v1/models", { signal }), json("/v1/files", { signal }), json("/v1/presets", { signal }),
        this.from ? jobs.get(this.from, signal) : null]);
      Object.assign(this, { schemas: description.components.schemas, models: models.data, files: files.data, presets: presets.data });
      this.document = origin ? specOf(origin) : structuredClone(START);
      if (!origin && this.files.length) this.document.training_file = this.files[0].id;
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.page.failed(error, this.root, "A job cannot be composed now.");
      return;
    }
    this.#build();
    this.#check();
  }

  #build() {
    const tab = (mode, label) => button(label, () => this.#switch(mode), { class: "small", "aria-pressed": String(this.mode === mode), dataset: { mode } });
    this.tabs = h("div", { class: "tabs", role: "group", "aria-label": "How to write the job" }, tab("form", "Form"), tab("json", "JSON"));
    this.form = new SchemaForm({
      schemas: this.schemas, document: this.document, onChange: () => this.#changed(), open: OPEN,
      sections: [["JobSpec", []], ["GrpoConfig", ["method", "grpo"]]], skip: ["method"],
      special: {
        model: (form, path, id) => this.#modelField(path, id), training_file: (form, path, id) => this.#fileField(path, id),
        validation_file: (form, path, id) => this.#fileField(path, id), "method.grpo.preset.name": (form, path, id) => this.#presetField(path, id),
      },
    });
    const editor = uniqueId("editor");
    this.text = h("textarea", { id: editor, class: "editor", spellcheck: "false", "aria-describedby": `${editor}-error`, on: { input: () => this.#typed() } });
    this.textError = h("p", { class: "error", id: `${editor}-error`, role: "status" });
    this.editor = h("div", { hidden: true }, h("label", { for: editor }, "The job as JSON"), this.text, this.textError);
    this.verdict = h("div", { role: "status" });
    this.resolved = h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "The job as it would run" });
    this.probe = new ProbePanel(() => this.document, (error) => { this.form.complain(null, ""); this.form.complain(error.param, error.message); });
    this.create = button("Create the job", () => this.#create(), { class: "primary", disabled: true });
    fill(this.root,
      h("div", { class: "titlebar" }, h("h1", {}, "New job"), this.tabs),
      h("p", { class: "hint" }, "Only what you set is sent; an empty field keeps the default shown in it. The server checks every change as you make it."),
      this.form.element, this.editor,
      h("details", { class: "group" }, h("summary", {}, "The job as it would run, after presets and defaults"), this.resolved),
      this.probe.element,
      h("div", { class: "verdict row" }, h("div", { class: "grow" }, this.verdict), this.create));
  }

  #modelField(path, id) {
    const list = `${id}-models`;
    const input = h("input", { id, list, autocomplete: "off", spellcheck: "false", value: valueAt(this.document, path) ?? "", on: { input: () => this.form.set(path, input.value || undefined) } });
    return h("div", {}, input, h("datalist", { id: list }, this.models.map((model) => h("option", { value: model.id }, `${model.kind}, ${model.owned_by}`))));
  }

  #fileField(path, id) {
    const select = h("select", { id, on: { change: () => this.form.set(path, select.value || undefined) } });
    const draw = () => options(select, [["", "none"], ...this.files.map((file) => [file.id, `${file.filename}, ${file.rows === null ? bytes(file.bytes) : count(file.rows, "row")}`])], valueAt(this.document, path));
    const state = h("p", { class: "hint", role: "status" });
    const upload = h("input", { type: "file", accept: ".jsonl,.csv,.parquet", "aria-label": `Upload a file as ${path.at(-1).replace("_", " ")}`, on: { change: async () => {
      if (!upload.files.length) return;
      setText(state, "Uploading and checking …");
      const form = new FormData();
      form.append("purpose", "fine-tune");
      form.append("file", upload.files[0]);
      try {
        const file = await json("/v1/files", { method: "POST", body: form });
        this.files = [file, ...this.files];
        setAt(this.document, path, file.id);
        setText(state, `${file.filename} was accepted.`);
        draw();
        this.#changed();
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        setText(state, `The file was refused: ${error.message}`);
      }
      upload.value = "";
    } } });
    draw();
    return h("div", {}, select, upload, state);
  }

  #presetField(path, id) {
    const about = h("p", { class: "hint" });
    const describe = () => {
      const preset = this.presets.find((item) => item.name === select.value);
      setText(about, preset ? `${preset.description} Source: ${preset.sources.join("; ")}.${Object.keys(preset.sizes).length ? ` Sizes: ${Object.keys(preset.sizes).join(", ")}.` : ""}` : "");
    };
    const select = h("select", { id, on: { change: () => { this.form.set(path, select.value || undefined); describe(); } } });
    options(select, [["", "none"], ...this.presets.map((preset) => [preset.name, preset.name])], valueAt(this.document, path));
    describe();
    return h("div", {}, select, about);
  }

  #switch(mode) {
    if (mode === this.mode) return;
    this.mode = mode;
    for (const tab of this.tabs.children) tab.setAttribute("aria-pressed", String(tab.dataset.mode === mode));
    this.form.element.hidden = mode !== "form";
    this.editor.hidden = mode !== "json";
    if (mode === "json") this.text.value = JSON.stringify(this.document, null, 2);
    else this.form.render();
    this.#check();
  }

  #typed() {
    try {
      const value = JSON.parse(this.text.value);
      if (value === null || typeof value !== "object" || Array.isArray(value)) throw new SyntaxError("the job must be an object");
      for (const key of Object.keys(this.document)) delete this.document[key];
      Object.assign(this.document, value);
      setText(this.textError, "");
      this.text.removeAttribute("aria-invalid");
      this.#changed();
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      setText(this.textError, `This is not JSON yet: ${error.message}`);
      this.text.setAttribute("aria-invalid", "true");
      this.#invalidate();
    }
  }

  /** What the server said so far is about another document. */
  #invalidate() {
    this.create.disabled = true;
    this.probe.outdated();
    this.checking?.abort();
    clearTimeout(this.timer);
  }

  #changed() {
    this.#invalidate();
    this.timer = setTimeout(() => this.#check(), CHECK_AFTER_MS);
  }

  /** Ask the server about the document as it is now; only the newest answer counts. */
  async #check() {
    this.checking?.abort();
    this.checking = new AbortController();
    try {
      const answer = await jobs.validate(this.document, this.checking.signal);
      this.form.complain(null, "");
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
      this.form.complain(null, "");
      this.form.complain(error.param, error.message);
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

/** What to post to get the same job again. */
function specOf(job) {
  const spec = { model: job.model, training_file: job.training_file, validation_file: job.validation_file, seed: job.seed, metadata: job.metadata, method: job.method };
  return Object.fromEntries(Object.entries(spec).filter(([, value]) => value !== null));
}
