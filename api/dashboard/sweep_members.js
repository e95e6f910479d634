/* The members of a sweep while it is written: each a change over the shared settings. */

import { announce, button, fill, h, setText, uniqueId } from "./dom.js";
import { typedNumber } from "./schema.js";

export const MOST_MEMBERS = 20;
const FEWEST = 2;
const TAGS = ["type", "rule"];

/** RFC 7396, as the server merges: an object of another `type` or `rule` replaces the base's whole. */
export function merged(target, patch) {
  if (!isObject(patch)) return patch;
  const isSameKind = isObject(target) && TAGS.every((tag) => patch[tag] === undefined || target[tag] === undefined || patch[tag] === target[tag]);
  const result = isSameKind ? { ...target } : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete result[key];
    else result[key] = merged(result[key], value);
  }
  return result;
}

/** A member's job as the server would see it. */
export function jobOf(spec, { beta, overrides }) {
  const job = merged(spec, overrides ?? {});
  if (beta === undefined) return job;
  return { ...job, method: { ...job.method, grpo: { ...job.method?.grpo, beta } } };
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** One member's fields. `variant()` throws a SyntaxError with a sentence while a field cannot be read. */
class Member {
  constructor(beta, onChange, onRemove) {
    const [name, value, more] = ["name", "beta", "overrides"].map((word) => uniqueId(word));
    const line = (id, attributes) => h("input", { id, autocomplete: "off", spellcheck: "false", ...attributes, on: { input: onChange } });
    this.name = line(name, { maxlength: "64" });
    this.beta = line(value, { value: beta, "aria-describedby": `${value}-hint` });
    this.overrides = h("textarea", { id: more, class: "mono", rows: 3, spellcheck: "false", placeholder: '{"method": {"grpo": {"kl": {"estimator": "k2"}}}}', "aria-describedby": `${more}-hint`, on: { input: onChange } });
    this.legend = h("legend", {});
    this.remove = button("Remove", onRemove, { class: "small" });
    this.verdict = h("p", { class: "hint" });
    this.element = h("fieldset", {}, this.legend,
      h("div", { class: "fields" },
        h("div", { class: "field" }, h("label", { for: value }, "β"), this.beta, h("p", { class: "hint", id: `${value}-hint` }, "A number, or a whole rule as JSON. Empty: as in the shared settings.")),
        h("div", { class: "field" }, h("label", { for: name }, "Name"), this.name)),
      h("details", {}, h("summary", {}, "Other changes"),
        h("div", { class: "field" }, h("label", { for: more }, "Overrides as JSON"), this.overrides,
          h("p", { class: "hint", id: `${more}-hint` }, "Laid over the shared settings; null takes a key away. Model, files, seed, data and reference are shared by all members."))),
      h("div", { class: "row" }, h("div", { class: "grow" }, this.verdict), this.remove));
  }

  place(number, isRemovable) {
    setText(this.legend, `Member ${number}`);
    this.remove.disabled = !isRemovable;
    this.remove.setAttribute("aria-label", `Remove member ${number}`);
  }

  variant() {
    const text = this.beta.value.trim();
    let beta = typedNumber(text);
    if (typeof beta === "string") beta = parsed(text, "β is neither a number nor a rule as JSON");
    const overrides = this.overrides.value.trim() === "" ? undefined : parsed(this.overrides.value, "the overrides are no JSON object");
    if (beta === undefined && overrides === undefined) throw new SyntaxError("it changes nothing yet; give it a β, or other changes");
    const name = this.name.value.trim() || undefined;
    return Object.fromEntries(Object.entries({ name, beta, overrides }).filter(([, given]) => given !== undefined));
  }

  say(text, isComplaint) {
    this.verdict.className = isComplaint ? "complaint" : "hint";
    setText(this.verdict, text);
    for (const input of [this.beta, this.overrides]) {
      if (isComplaint) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
  }
}

function parsed(text, sentence) {
  try {
    const value = JSON.parse(text);
    if (isObject(value)) return value;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    throw new SyntaxError(`${sentence}: ${error.message}`);
  }
  throw new SyntaxError(sentence);
}

/** The list of members; `onChange()` after each edit. */
export class Members {
  constructor(onChange) {
    this.onChange = onChange;
    this.list = h("div", {});
    this.add = button("Add a member", () => { this.#push("").beta.focus(); announce("A member was added."); this.onChange(); });
    this.element = h("section", { class: "panel", "aria-label": "Members" }, this.list, h("div", { class: "row" }, this.add));
    this.all = [];
    for (const beta of ["0.01", "0.04"]) this.#push(beta);
  }

  #push(beta) {
    const member = new Member(beta, () => this.onChange(), () => this.#drop(member));
    this.all.push(member);
    this.#draw();
    return member;
  }

  #drop(member) {
    const at = this.all.indexOf(member);
    this.all.splice(at, 1);
    this.#draw();
    this.all[Math.min(at, this.all.length - 1)].beta.focus();
    announce(`Member ${at + 1} was removed.`);
    this.onChange();
  }

  #draw() {
    for (const [at, member] of this.all.entries()) member.place(at + 1, this.all.length > FEWEST);
    this.add.disabled = this.all.length >= MOST_MEMBERS;
    const known = new Set(this.list.children);
    for (const { element } of this.all) if (!known.has(element)) this.list.append(element);
    for (const element of known) if (!this.all.some((member) => member.element === element)) element.remove();
  }
}
