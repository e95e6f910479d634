/* The completions of a step as a list to choose from: order, reward filter, one line each. */

import { fill, h } from "./dom.js";
import { number, toNumber } from "./format.js";

export const ORDERS = {
  sampled: ["as sampled", (a, b) => a.index - b.index],
  high: ["highest reward first", (a, b) => by(toNumber(b.reward), toNumber(a.reward))],
  low: ["lowest reward first", (a, b) => by(toNumber(a.reward), toNumber(b.reward))],
  kl: ["largest KL first", (a, b) => by(toNumber(b.kl), toNumber(a.kl))],
  long: ["longest first", (a, b) => b.num_tokens - a.num_tokens],
};

/** Ascending, values that are no numbers last. */
function by(left, right) {
  const [isLeft, isRight] = [Number.isFinite(left), Number.isFinite(right)];
  return isLeft && isRight ? left - right : Number(isRight) - Number(isLeft);
}

/** Completions whose reward lies between two bounds (null = open), in an order. Rewards that are no numbers pass open bounds only. */
export function choose(completions, { order, from, to }) {
  const isInside = ({ reward }) => {
    const value = toNumber(reward);
    return (from === null || value >= from) && (to === null || value <= to);
  };
  return completions.filter(isInside).sort(ORDERS[order][1]);
}

/** `onChoose(completion)` when one is picked. */
export class RolloutList {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.items = new Map();
    this.element = h("ol", { class: "rollouts", "aria-label": "Completions" });
  }

  show(completions, order) {
    this.items.clear();
    let row = null;
    const nodes = [];
    for (const one of completions) {
      if (order === "sampled" && one.row !== row) nodes.push(h("li", { class: "prompt-head soft" }, `Prompt ${one.row + 1}${one.prompt === null ? "" : `: ${excerpt(tail(one.prompt))}`}`));
      row = one.row;
      const item = h("button", { type: "button", class: "rollout", on: { click: () => this.onChoose(one) } },
        h("span", { class: "facts-line" }, h("strong", {}, `${one.index + 1}`), ` reward ${number(one.reward, 3)} · KL ${number(one.kl, 3)} · ${one.num_tokens} tokens${one.is_truncated ? ", cut off" : ""}`),
        h("span", { class: "excerpt" }, one.completion === null ? "text not kept" : excerpt(one.completion) || "(empty)"));
      this.items.set(one.index, item);
      nodes.push(h("li", {}, item));
    }
    fill(this.element, nodes);
  }

  /** Mark the one that is shown. */
  mark(index) {
    for (const [place, item] of this.items) {
      if (place === index) item.setAttribute("aria-current", "true");
      else item.removeAttribute("aria-current");
    }
    const item = this.items.get(index);
    if (item && this.element.scrollHeight > this.element.clientHeight) {
      const top = item.offsetTop - this.element.offsetTop;
      const isSeen = top >= this.element.scrollTop && top + item.offsetHeight <= this.element.scrollTop + this.element.clientHeight;
      if (!isSeen) this.element.scrollTop = top - this.element.clientHeight / 3;
    }
  }
}

/** The first words on one line. */
function excerpt(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 110 ? `${line.slice(0, 110)} …` : line;
}

/** The end of a prompt tells more than its beginning, which templates share. */
function tail(text) {
  const line = text.trim();
  return line.length > 110 ? `… ${line.slice(-108)}` : line;
}
