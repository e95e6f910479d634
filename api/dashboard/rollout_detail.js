/* One completion: prompt, text shaded by KL, what it earned, and what differs from another answer to the same prompt. */

import { fill, h, uniqueId } from "./dom.js";
import { count, number, toNumber } from "./format.js";
import { TokenText } from "./rollout_tokens.js";
import { options } from "./schema_form.js";
import { diff } from "./text_diff.js";

const REFERENCE = "reference";
const NOTHING = "nothing";

/** `onCompare(value)` when the reader chose what to compare with: a completion's index, "reference" or "nothing". */
export class RolloutDetail {
  constructor(onCompare) {
    this.onCompare = onCompare;
    this.heading = h("h2", { tabindex: "-1" });
    this.body = h("div", {});
    this.element = h("section", { class: "panel rollout-detail", "aria-label": "The chosen completion" }, this.heading, this.body);
  }

  /** Show a completion. `against`: what to compare with (null: the reference, if it answered). `missing`: why it did not. */
  show(one, siblings, bounds, against, missing) {
    fill(this.heading, `Completion ${one.index + 1}`);
    fill(this.body, facts(one), parts(one),
      one.completion === null
        ? h("p", { class: "soft" }, "This job keeps no prompt and no text (telemetry.rollouts_redact), only what is measured.")
        : [h("h3", {}, "Prompt"), h("pre", { class: "log prompt", tabindex: "0", role: "region", "aria-label": "Prompt" }, one.prompt),
          h("h3", {}, "Completion"), new TokenText(one, bounds).element, this.#comparison(one, siblings, against, missing)]);
  }

  #comparison(one, siblings, against, missing) {
    const others = new Map(siblings.filter((other) => other.index !== one.index).map((other) => [String(other.index), { name: `completion ${other.index + 1}, reward ${number(other.reward, 3)}`, text: other.completion }]));
    if (one.reference) others.set(REFERENCE, { name: "the reference’s own answer", text: one.reference.completion });
    const entries = [[NOTHING, "nothing"], ...[...others].sort(([a], [b]) => Number(b === REFERENCE) - Number(a === REFERENCE)).map(([value, { name }]) => [value, name])];
    const id = uniqueId("against");
    const select = h("select", { id });
    const wanted = against ?? REFERENCE;
    options(select, entries, others.has(wanted) ? wanted : NOTHING);
    const place = h("div", {});
    const draw = () => fill(place, others.has(select.value) ? [select.value === REFERENCE ? agreement(one) : null, changes(others.get(select.value).text, one.completion)] : null);
    select.addEventListener("change", () => { this.onCompare(select.value); draw(); });
    draw();
    const note = one.reference ? "The reference answered the same prompt with the same random draws: where the texts part, the policy chose otherwise." : missing;
    return [h("h3", {}, "Compare"), h("div", { class: "field" }, h("label", { for: id }, "Differences from"), select, h("p", { class: "hint" }, note)), place];
  }
}

/** How far the policy still says what the reference says. */
function agreement({ num_tokens: length, reference: { num_same_tokens: same, num_tokens: other, is_truncated: isCut } }) {
  if (same === length && same === other) return h("p", {}, "The reference gives the very same answer.");
  const begins = same === 0 ? "They part at the first token." : `The first ${count(same, "token")} of ${length.toLocaleString()} are the same.`;
  return h("p", {}, `${begins} The reference’s answer has ${count(other, "token")}${isCut ? ", cut off at the limit" : ""}.`);
}

function facts(one) {
  const advantage = toNumber(one.advantage);
  const words = { reward: number(one.reward), advantage: advantage === null ? "–" : number(advantage), kl: `${number(one.kl)} nats per token`,
    length: `${one.num_tokens.toLocaleString()} tokens${one.is_truncated ? ", cut off at the limit" : ""}`, prompt: `row ${one.row + 1}, ${one.num_prompt_tokens.toLocaleString()} tokens` };
  const names = { reward: "Reward", advantage: "Advantage", kl: "Mean KL", length: "Length", prompt: "Prompt" };
  return h("dl", { class: "facts" }, Object.entries(words).map(([key, text]) => h("div", {}, h("dt", { class: "soft" }, names[key]), h("dd", {}, text))));
}

/** What each part of a composed grader gave. */
function parts(one) {
  const entries = Object.entries(one.parts);
  if (!entries.length) return null;
  return h("table", { class: "narrow" }, h("caption", { class: "soft" }, "Parts of the grader"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Part"), h("th", { scope: "col" }, "Score"))),
    h("tbody", {}, entries.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, number(value))))));
}

function changes(before, after) {
  const pieces = diff(before, after);
  if (pieces.every(({ kind }) => kind === "same")) return h("p", { class: "soft" }, "Both are the same text.");
  const tags = { same: "span", gone: "del", new: "ins" };
  return [h("p", { class: "hint" }, h("del", {}, "struck out"), ": only in the other one. ", h("ins", {}, "underlined"), ": only in this one."),
    h("div", { class: "log diff", tabindex: "0", role: "region", "aria-label": "Differences" }, pieces.map(({ kind, text }) => h(tags[kind], {}, text)))];
}
