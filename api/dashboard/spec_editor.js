/* Writing a job's spec: a form from the server's own schema, or JSON. Edits a document in place and says when it changed. */

import { ApiError, json } from "./api.js";
import { button, fill, h, setText, uniqueId } from "./dom.js";
import { bytes, count } from "./format.js";
import { setAt, valueAt } from "./schema.js";
import { options, SchemaForm } from "./schema_form.js";

const OPEN = ["method.grpo.grader", "method.grpo.beta", "method.grpo.limits", "method.grpo.sampling", "method.grpo.preset"];
const START = { model: "smollm2-135m-instruct", method: { type: "grpo", grpo: { grader: { type: "math" }, beta: { rule: "fixed", value: 0.02 } } } };

/** What a spec is chosen from: schemas, models, files and presets of the server. */
export async function choices(signal) {
  const [description, models, files, presets] = await Promise.all(["/openapi.json", "/v1/models", "/v1/files", "/v1/presets"].map((path) => json(path, { signal })));
  return { schemas: description.components.schemas, models: models.data, files: files.data, presets: presets.data };
}

/** The spec a form begins with: what makes the same job again, or a plain one on the newest file. */
export function startingSpec(origin, files) {
  if (!origin) return { ...structuredClone(START), ...(files.length ? { training_file: files[0].id } : {}) };
  const spec = { model: origin.model, training_file: origin.training_file, validation_file: origin.validation_file, seed: origin.seed, metadata: origin.metadata, method: origin.method };
  return Object.fromEntries(Object.entries(spec).filter(([, value]) => value !== null));
}

/** `onChange()` after each edit, `onBroken()` while the JSON is none. `element` is the editor, `tabs` the switch between its two faces. */
export class SpecEditor {
  constructor({ schemas, models, files, presets }, document, { onChange, onBroken }) {
    Object.assign(this, { models, files, presets, document, onChange, onBroken });
    this.mode = "form";
    const tab = (mode, label) => button(label, () => this.#switch(mode), { class: "small", "aria-pressed": String(this.mode === mode), dataset: { mode } });
    this.tabs = h("div", { class: "tabs", role: "group", "aria-label": "How to write the job" }, tab("form", "Form"), tab("json", "JSON"));
    this.form = new SchemaForm({
      schemas, document, onChange, open: OPEN, sections: [["JobSpec", []], ["GrpoConfig", ["method", "grpo"]]], skip: ["method"],
      special: {
        model: (form, path, id) => this.#modelField(path, id), training_file: (form, path, id) => this.#fileField(path, id),
        validation_file: (form, path, id) => this.#fileField(path, id), "method.grpo.preset.name": (form, path, id) => this.#presetField(path, id),
      },
    });
    const id = uniqueId("editor");
    this.text = h("textarea", { id, class: "editor", spellcheck: "false", "aria-describedby": `${id}-error`, on: { input: () => this.#typed() } });
    this.textError = h("p", { class: "error", id: `${id}-error`, role: "status" });
    this.editor = h("div", { hidden: true }, h("label", { for: id }, "The job as JSON"), this.text, this.textError);
    this.element = h("div", {}, this.form.element, this.editor);
  }

  /** Show a complaint where its field is; an empty text clears all. */
  complain(param, text) {
    this.form.complain(null, "");
    if (text) this.form.complain(param, text);
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
        this.onChange();
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
    this.onChange();
  }

  #typed() {
    try {
      const value = JSON.parse(this.text.value);
      if (value === null || typeof value !== "object" || Array.isArray(value)) throw new SyntaxError("the job must be an object");
      for (const key of Object.keys(this.document)) delete this.document[key];
      Object.assign(this.document, value);
      setText(this.textError, "");
      this.text.removeAttribute("aria-invalid");
      this.onChange();
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      setText(this.textError, `This is not JSON yet: ${error.message}`);
      this.text.setAttribute("aria-invalid", "true");
      this.onBroken();
    }
  }
}
