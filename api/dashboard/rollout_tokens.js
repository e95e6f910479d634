/* The tokens of a completion, shaded by KL: a scale with numbers, and the token under the pointer or the arrow keys in words. */

import { h, setText } from "./dom.js";
import { number, toNumber } from "./format.js";

const NUM_CLASSES = 5;
const STRIDE = 3;
const MARKS = { "\n": "↵\n", "\r": "␍", "\t": "⇥\t" };

/**
 * Classes of |KL| for all tokens of a step, so that its completions compare: each three times the one below, the highest at the
 * 99th percentile. An array of lower bounds in nats, ascending; empty when no token has a KL other than 0.
 */
export function classesOf(values) {
  const sizes = values.map(Math.abs).filter((value) => Number.isFinite(value) && value > 0).sort((a, b) => a - b);
  if (!sizes.length) return [];
  const top = Number(sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.99))].toPrecision(2));
  return Array.from({ length: NUM_CLASSES }, (_, index) => top / STRIDE ** (NUM_CLASSES - 1 - index));
}

/** 0 below the lowest bound, else the number of bounds reached. A value that is no number is of the highest class. */
export function classOf(value, bounds) {
  if (value === null) return 0;
  if (!Number.isFinite(value)) return bounds.length;
  return bounds.filter((bound) => Math.abs(value) >= bound).length;
}

/** The scale: a swatch for each class with its bound. */
export function scaleLegend(bounds) {
  if (!bounds.length) return h("p", { class: "hint" }, "No token of this step left the reference: every KL is 0 or was not measured.");
  const steps = [[0, `below ${number(bounds[0], 2)}`], ...bounds.map((bound, index) => [index + 1, `from ${number(bound, 2)}`])];
  return h("div", { class: "kl-scale" }, h("span", { class: "soft" }, "KL of a token, nats:"),
    h("ul", { class: "legend" }, steps.map(([place, text]) => h("li", { class: "key" }, h("span", { class: `token k${place}`, "aria-hidden": "true" }, "Aa"), text))),
    h("span", { class: "soft" }, "Dotted: below 0."));
}

/** The text token by token; the arrow keys and the pointer read one token at a time. */
export class TokenText {
  constructor(completion, bounds) {
    this.completion = completion;
    const texts = completion.token_texts ?? [];
    this.tokens = texts.map((text, index) => {
      const kl = toNumber(completion.token_kl?.[index]);
      const isNegative = kl !== null && kl < 0 && classOf(kl, bounds) > 0;
      return h("span", { class: `token k${classOf(kl, bounds)}${isNegative ? " negative" : ""}`, dataset: { index: String(index) } }, shown(text));
    });
    this.reading = h("p", { class: "reading-line", role: "status" }, this.#whole());
    this.stage = h("div", {
      class: "tokens", tabindex: "0", role: "group", "aria-label": "Completion, token by token; the arrow keys read each one",
      on: { keydown: (event) => this.#key(event), pointerover: (event) => this.#hover(event), pointerleave: () => this.#choose(-1), blur: () => this.#choose(-1) },
    }, this.tokens);
    this.chosen = -1;
    this.element = h("div", {}, this.stage, this.reading);
  }

  #whole() {
    const { num_tokens: length, kl } = this.completion;
    return `${length} tokens, mean KL ${number(kl)} nats. Point at a token, or focus the text and use the arrow keys; K jumps to the largest KL.`;
  }

  #hover(event) {
    const { index } = event.target.dataset ?? {};
    if (index !== undefined) this.#choose(Number(index));
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.tokens.length) return;
    const last = this.tokens.length - 1;
    const next = {
      ArrowRight: Math.min(last, this.chosen + 1), ArrowDown: Math.min(last, this.chosen + 1), ArrowLeft: Math.max(0, this.chosen - 1), ArrowUp: Math.max(0, this.chosen - 1),
      Home: 0, End: last, k: this.#largest(), K: this.#largest(), Escape: -1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.#choose(next);
    this.tokens[next]?.scrollIntoView({ block: "nearest" });
  }

  #largest() {
    const values = (this.completion.token_kl ?? []).map((raw) => Math.abs(toNumber(raw)));
    return values.reduce((best, value, index) => (value > values[best] || Number.isNaN(value) ? index : best), 0);
  }

  #choose(index) {
    if (index === this.chosen) return;
    this.tokens[this.chosen]?.classList.remove("chosen");
    this.chosen = index;
    this.tokens[index]?.classList.add("chosen");
    setText(this.reading, index < 0 ? this.#whole() : this.#sentence(index));
  }

  #sentence(index) {
    const { token_texts: texts, token_ids: ids, token_kl: kl, token_logprobs: logprobs } = this.completion;
    const probability = toNumber(logprobs?.[index]);
    const parts = [`KL ${kl ? `${number(kl[index])} nats` : "was not measured"}`];
    if (probability !== null) parts.push(`log-probability ${number(probability)} (${percent(Math.exp(probability))})`);
    return `Token ${index + 1} of ${texts.length}, “${shown(texts[index]).trim() || "space"}”${ids ? `, id ${ids[index]}` : ""}: ${parts.join(", ")}.`;
  }
}

function percent(share) {
  if (!Number.isFinite(share)) return "–";
  return share > 0 && share < 0.001 ? "below 0.1 %" : `${number(100 * share, 3)} %`;
}

/** White space that would not be seen gets a sign. */
function shown(text) {
  return text.replace(/[\n\r\t]/g, (mark) => MARKS[mark]);
}
