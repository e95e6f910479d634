/* A form made from a JSON schema. It edits a document in place and leaves out what was not set, so defaults stay the server's. */

import { append, fill, h, setText, uniqueId } from "./dom.js";
import { fieldOf, limitsOf, setAt, typedNumber, valueAt } from "./schema.js";

/**
 * `sections`: [name of a schema, path of its object in the document], shown one after the other.
 * `special`: path → function(form, path, id) that makes the field itself. `open`: paths of groups shown unfolded.
 * `onChange()` after each edit. `inherited`: a document that holds wherever this one says nothing; without it the schema's defaults do.
 */
export class SchemaForm {
  constructor({ schemas, sections, document, onChange, inherited = null, special = {}, open = [], skip = [] }) {
    Object.assign(this, { schemas, sections, document, onChange, inherited, special, open: new Set(open), order: open, skip: new Set(skip) });
    this.places = new Map();
    this.element = h("div", {});
    this.render();
  }

  /** Build anew, for example after the document was changed elsewhere. */
  render() {
    const openNow = [...this.element.querySelectorAll("details[open]")].map((group) => group.dataset.path);
    for (const path of openNow) this.open.add(path);
    this.places.clear();
    fill(this.element, this.sections.map(([root, path]) => this.#properties({ $ref: root }, path)));
  }

  /** Show a complaint at the field a path names, or at the nearest one above; false when there is none. Empty text clears all. */
  complain(param, text) {
    for (const place of this.places.values()) place.say("");
    if (!text) return true;
    const keys = (param ?? "").split(/[.[\]]+/).filter(Boolean);
    for (let length = keys.length; length > 0; length -= 1) {
      const place = this.places.get(keys.slice(0, length).join("."));
      if (place) {
        place.say(text);
        return true;
      }
    }
    return false;
  }

  #properties(schema, path) {
    const { properties, schema: whole } = fieldOf(schema, this.schemas);
    const entries = Object.entries(properties).filter(([name]) => !this.skip.has([...path, name].join(".")));
    const isSimple = ([, property]) => !["object", "union", "json"].includes(fieldOf(property, this.schemas).kind);
    const simple = entries.filter((entry) => isSimple(entry) && fieldOf(entry[1], this.schemas).schema.const === undefined);
    const groups = entries.filter((entry) => !isSimple(entry));
    return [
      simple.length ? h("div", { class: "fields" }, simple.map(([name, property]) => this.#field(property, [...path, name], whole.required?.includes(name)))) : null,
      this.#ordered(groups).map(([name, property]) => this.#group(property, [...path, name])),
    ];
  }

  /** Groups that are unfolded at first come first, in the order they were named. */
  #ordered(groups) {
    const rank = ([name]) => this.order.findIndex((path) => path.split(".").at(-1) === name) >>> 0;
    return groups.sort((a, b) => rank(a) - rank(b));
  }

  /** An object, a union or free JSON: unfoldable, with a switch when it may be left out. */
  #group(raw, path) {
    const name = path.join(".");
    const field = fieldOf(raw, this.schemas);
    const body = h("div", {});
    const group = h("details", { class: "group", open: this.open.has(name), dataset: { path: name } }, h("summary", {}, words(path.at(-1))), body);
    const draw = () => fill(body, field.schema.description ? h("p", { class: "hint" }, marked(field.schema.description)) : null, this.#inside(field, raw, path, draw), this.#error(name));
    if (group.open) draw();
    group.addEventListener("toggle", () => {
      if (group.open) { this.open.add(name); if (!body.hasChildNodes()) draw(); } else this.open.delete(name);
    });
    this.places.set(name, {
      say: (text) => {
        if (text && !group.open) { group.open = true; if (!body.hasChildNodes()) draw(); }
        const error = body.querySelector(`[data-error="${CSS.escape(name)}"]`);
        if (error) { error.hidden = !text; setText(error, text); }
      },
    });
    return group;
  }

  #error(name) { return h("p", { class: "error notice", hidden: true, dataset: { error: name } }); }

  #inside(field, raw, path, redraw) {
    const now = valueAt(this.document, path);
    if (field.kind === "union") return this.#union(field, path, redraw);
    if (field.kind === "json") return this.#json(path, now, field.schema);
    if (!field.isOptional) return this.#properties(field.schema, path);
    const below = this.#below(path) ?? null;
    const isOn = (now === undefined ? below : now) !== null;
    const id = uniqueId("use");
    const turn = (isChecked) => (isChecked ? (below === null ? this.#start(field) : undefined) : below === null ? undefined : null);
    const box = h("input", { id, type: "checkbox", checked: isOn, on: { change: () => { this.set(path, turn(box.checked)); redraw(); } } });
    return [h("div", { class: "field check" }, box, h("label", { for: id }, `Use ${words(path.at(-1)).toLowerCase()}`)), isOn ? this.#properties(field.schema, path) : null];
  }

  /** What an object must hold to be one of its kind: its constants. */
  #start(field) {
    const constants = Object.entries(field.properties ?? {}).filter(([, property]) => property.const !== undefined);
    return Object.fromEntries(constants.map(([name, property]) => [name, property.const]));
  }

  #union(field, path, redraw) {
    const now = valueAt(this.document, path);
    const below = this.#below(path)?.[field.tag];
    const fallback = below ?? field.schema.default?.[field.tag] ?? "";
    const current = now && typeof now === "object" ? now[field.tag] : typeof now === "number" ? "fixed" : "";
    const id = uniqueId("kind");
    const select = h("select", { id, on: { change: () => {
      this.set(path, select.value ? { [field.tag]: select.value } : undefined);
      redraw();
    } } },
    h("option", { value: "" }, below ? `as it is (${below})` : fallback ? `default (${fallback})` : "none"),
    Object.keys(field.branches).map((name) => h("option", { value: name }, name)));
    select.value = current;
    if (typeof now === "number") setAt(this.document, path, { [field.tag]: "fixed", value: now });
    const branch = field.branches[current];
    const about = branch ? fieldOf(branch, this.schemas).schema.description : "";
    return [h("div", { class: "field" }, h("label", { for: id }, words(field.tag)), select, about ? h("p", { class: "hint" }, marked(about)) : null),
      branch ? this.#branch(branch, path, field.tag) : null];
  }

  #branch(branch, path, tag) {
    const name = [...path, tag].join(".");
    const had = this.skip.has(name);
    this.skip.add(name);
    const body = this.#properties(branch, path);
    if (!had) this.skip.delete(name);
    return body;
  }

  #field(raw, path, isRequired) {
    const name = path.join(".");
    const field = fieldOf(raw, this.schemas);
    const label = words(path.at(-1)) + (isRequired ? " (required)" : "");
    const id = uniqueId("field");
    const error = h("p", { class: "error", id: `${id}-error`, hidden: true });
    const bounds = limitsOf(field.schema);
    const hint = [marked(field.schema.description ?? ""), bounds ? ` (${bounds})` : ""];
    const input = this.special[name] ? this.special[name](this, path, id) : this.#input(field, path, id);
    const control = input.matches("input, select, textarea") ? input : input.querySelector("input, select, textarea");
    control.setAttribute("aria-describedby", `${id}-hint`);
    this.places.set(name, {
      say: (text) => {
        error.hidden = !text;
        setText(error, text);
        if (text) control.setAttribute("aria-invalid", "true");
        else control.removeAttribute("aria-invalid");
        control.setAttribute("aria-describedby", text ? `${id}-error ${id}-hint` : `${id}-hint`);
      },
    });
    const isBox = field.kind === "boolean" && !this.special[name];
    const parts = isBox ? [input, h("label", { for: id }, label)] : [h("label", { for: id }, label), input];
    return h("div", { class: `field${isBox ? " check" : ""}` }, parts, h("p", { class: "hint", id: `${id}-hint` }, hint), error);
  }

  #input(field, path, id) {
    const now = valueAt(this.document, path);
    const { schema } = field;
    const below = this.#below(path);
    const usual = below === undefined ? schema.default : below;
    const standard = usual === undefined || usual === null ? "" : String(usual);
    const word = below === undefined ? "default" : "as it is";
    const commit = (value) => this.set(path, value);
    switch (field.kind) {
      case "boolean": {
        const box = h("input", { id, type: "checkbox", checked: now ?? usual ?? false, on: { change: () => commit(box.checked === (usual ?? false) ? undefined : box.checked) } });
        return box;
      }
      case "choice": {
        const select = h("select", { id, on: { change: () => commit(select.value === "" ? undefined : field.options.find((option) => String(option) === select.value)) } },
          h("option", { value: "" }, standard ? `${word} (${standard})` : word), field.options.map((option) => h("option", { value: String(option) }, String(option))));
        select.value = now === undefined || now === null ? "" : String(now);
        return select;
      }
      case "number": return this.#line(id, now, standard, (text) => commit(typedNumber(text)), { inputmode: "decimal" });
      case "list": {
        const separated = Array.isArray(now) ? now.join(", ") : now;
        return this.#line(id, separated, standard.replaceAll(",", ", "), (text) => commit(this.#list(text, field.isNumeric)));
      }
      default: return this.#line(id, now, standard, (text) => commit(text === "" ? undefined : text));
    }
  }

  #line(id, now, standard, onInput, attributes = {}) {
    const input = h("input", { id, autocomplete: "off", spellcheck: "false", placeholder: standard, value: now === undefined || now === null ? "" : String(now), ...attributes, on: { input: () => onInput(input.value) } });
    return input;
  }

  #list(text, isNumeric) {
    const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
    return parts.length ? parts.map((part) => (isNumeric ? typedNumber(part) : part)) : undefined;
  }

  #json(path, now, schema) {
    const id = uniqueId("json");
    const usual = this.#below(path) ?? schema.default;
    const area = h("textarea", { id, rows: 4, spellcheck: "false", class: "mono", placeholder: usual === undefined ? "" : JSON.stringify(usual),
      value: now === undefined ? "" : JSON.stringify(now, null, 2), on: { input: () => {
        const text = area.value.trim();
        try {
          this.set(path, text === "" ? undefined : JSON.parse(text));
          area.setCustomValidity("");
        } catch (error) {
          if (!(error instanceof SyntaxError)) throw error;
          area.setCustomValidity(`This is not JSON: ${error.message}`);
          area.reportValidity();
        }
      } } });
    return h("div", { class: "field" }, h("label", { for: id }, `${words(path.at(-1))} as JSON`), area);
  }

  /** What is inherited at a path; undefined where nothing is, or where the document chose another kind (rule, type) above it. */
  #below(path) {
    let [own, below] = [this.document, this.inherited];
    for (const key of path) {
      if (below === null || typeof below !== "object") return undefined;
      if (["rule", "type"].some((tag) => own?.[tag] !== undefined && own[tag] !== below[tag])) return undefined;
      [own, below] = [own?.[key], below[key]];
    }
    return below;
  }

  /** Change the document. */
  set(path, value) {
    setAt(this.document, path, value);
    this.onChange();
  }
}

const NAMES = { kl: "KL", beta: "β", ema_decay: "EMA decay", gpus: "GPUs", ddof: "ddof" };

/** `max_grad_norm` → "Max grad norm". */
export function words(name) {
  const text = name.replaceAll("_", " ");
  return NAMES[name] ?? text[0].toUpperCase() + text.slice(1);
}

/** Text whose `quoted` parts are code. */
function marked(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

/** Fill a select with options and keep what was chosen. */
export function options(select, entries, chosen) {
  fill(select);
  append(select, entries.map(([value, text]) => h("option", { value }, text)));
  select.value = chosen ?? "";
}
