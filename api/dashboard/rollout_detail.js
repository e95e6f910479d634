/* One completion: prompt, text shaded by KL, what it earned, and what differs from another answer to the same prompt. */

import { fill, h, uniqueId } from "./dom.js";
import { number, toNumber } from "./format.js";
import { TokenText } from "./rollout_tokens.js";
import { options } from "./schema_form.js";
import { diff } from "./text_diff.js";

/** `siblings`: all completions of the same prompt. `chosen`: what the reader compared the last one with. Returns {element, place}. */
export class RolloutDetail {
  constructor(onCompare) {
    this.onCompare = onCompare;
    this.heading = h("h2", { tabindex: "-1" });
    this.body = h("div", {});
    this.element = h("section", { class: "panel rollout-detail", "aria-label": "The chosen completion" }, this.heading, this.body);
  }

  /** Show a completion; `buttons` stand in the heading. */
  show(one, siblings, bounds, against) {
    fill(this.heading, `Completion ${one.index + 1}`);
    fill(this.body, facts(one), parts(one),
      one.completion === null
        ? h("p", { class: "soft" }, "This job keeps no prompt and no text (telemetry.rollouts_redact), only what is measured.")
        : [h("h3", {}, "Prompt"), h("pre", { class: "log prompt", tabindex: "0", role: "region", "aria-label": "Prompt" }, one.prompt),
          h("h3", {}, "Completion"), new TokenText(one, bounds).element, this.#comparison(one, siblings, against)]);
  }

  #comparison(one, siblings, against) {
    const others = siblings.filter((other) => other.index !== one.index);
    const entries = [["", "nothing"], ...others.map((other) => [String(other.index), `completion ${other.index + 1}, reward ${number(other.reward, 3)}`])];
    const id = uniqueId("against");
    const select = h("select", { id });
    options(select, entries, entries.some(([value]) => value === against) ? against : "");
    const place = h("div", {});
    const draw = () => fill(place, select.value === "" ? null : changes(one, select.value, others));
    select.addEventListener("change", () => { this.onCompare(select.value); draw(); });
    draw();
    const note = "The reference’s own answer is not recorded, so it cannot be shown. What can be compared is another completion of the same prompt; how far each token is from the reference is the shading above.";
    return [h("h3", {}, "Compare"), h("div", { class: "field" }, h("label", { for: id }, "Differences from"), select, h("p", { class: "hint" }, note)), place];
  }
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

function changes(one, choice, others) {
  const before = others.find((other) => String(other.index) === choice)?.completion ?? "";
  const pieces = diff(before, one.completion);
  if (pieces.every(({ kind }) => kind === "same")) return h("p", { class: "soft" }, "Both are the same text.");
  const tags = { same: "span", gone: "del", new: "ins" };
  return [h("p", { class: "hint" }, h("del", {}, "struck out"), ": only in the other one. ", h("ins", {}, "underlined"), ": only in this one."),
    h("div", { class: "log diff", tabindex: "0", role: "region", "aria-label": "Differences" }, pieces.map(({ kind, text }) => h(tags[kind], {}, text)))];
}
