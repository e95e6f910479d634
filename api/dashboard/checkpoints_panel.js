/* Published weights: download, pin, promote, fork, delete. What cannot be undone is asked for twice. */

import { checkpoints, jobs } from "./api.js";
import { announce, button, confirmed, fill, guarded, h, setText } from "./dom.js";
import { save } from "./download.js";
import { ago, bytes, number, time } from "./format.js";
import { promotion } from "./promote_dialog.js";

const HEAD = ["Step", "KL", "Reward", "β", "Size", "Saved", "Name to load or to train on", "State", ""];
const GATES = { max_ref_kl: "KL at most", min_reward: "reward at least", max_beta: "β at most", min_step: "step at least" };

/** Table of a job's checkpoints, newest first. */
export class CheckpointsPanel {
  constructor(id) {
    this.id = id;
    this.message = h("div", {});
    this.content = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of checkpoints" });
    this.element = h("section", { class: "panel", "aria-labelledby": "checkpoints-title" }, h("h2", { id: "checkpoints-title" }, "Checkpoints"), this.message, this.content);
  }

  load(signal) {
    return guarded(this.message, "The checkpoints could not be read.", async () => {
      const answer = await jobs.checkpoints(this.id, { limit: 100 }, signal);
      if (!answer.data.length) return fill(this.content, h("p", { class: "soft" }, "None published yet. The last step is always published; method.grpo.checkpoints.every asks for more."));
      return fill(this.content, h("table", {},
        h("thead", {}, h("tr", {}, HEAD.map((text) => (text ? h("th", { scope: "col" }, text) : h("td", {}, h("span", { class: "visually-hidden" }, "Actions")))))),
        h("tbody", {}, answer.data.map((item) => this.#row(item)))));
    });
  }

  #row(item) {
    const { ref_kl: kl, reward, beta } = item.metrics;
    const progress = h("span", { class: "soft", role: "status" });
    const act = (label, listener, name = "small") => button(label, listener, { class: name, "aria-label": `${label.replace(" …", "")} the checkpoint of step ${item.step_number}` });
    return h("tr", { dataset: { checkpoint: item.id } },
      h("th", { scope: "row" }, item.step_number.toLocaleString()), h("td", {}, number(kl)), h("td", {}, number(reward)), h("td", {}, number(beta)),
      h("td", {}, bytes(item.bytes)), h("td", { title: time(item.created_at) }, ago(item.created_at)), h("td", {}, h("code", {}, item.id)), h("td", {}, stateOf(item)),
      h("td", {}, h("div", { class: "row actions" },
        act("Download", () => this.#download(item, progress)),
        item.promotion ? act("Withdraw …", () => this.#withdraw(item)) : act("Promote …", () => this.#promote(item)),
        item.promotion ? null : item.pinned ? act("Unpin …", () => this.#unpin(item)) : act("Pin", () => this.#pin(item)),
        h("a", { class: "button small", href: `#/jobs/${this.id}/fork?checkpoint=${encodeURIComponent(item.id)}`, "aria-label": `Fork from the checkpoint of step ${item.step_number}` }, "Fork"),
        item.pinned ? null : act("Delete …", () => this.#remove(item), "small danger"), progress)));
  }

  #download(item, progress) {
    return guarded(this.message, "The download failed.", async () => {
      const path = jobs.path(this.id, `/checkpoints/${encodeURIComponent(item.id)}/content`);
      await save(path, `${this.id}-${item.name}.tar`, (done) => setText(progress, `${bytes(done)} of ${bytes(item.bytes)}`));
    });
  }

  async #promote(item) {
    const isPromoted = await promotion(item, (body) => checkpoints.promote(this.id, item.id, body));
    if (!isPromoted) return;
    announce(`The checkpoint of step ${item.step_number} is promoted.`);
    await this.load();
  }

  async #withdraw(item) {
    const text = `The checkpoint of step ${item.step_number} is no longer offered first among the models. It stays pinned.`;
    if (await confirmed("Withdraw this promotion?", text, "Withdraw it")) await this.#do("The promotion was not withdrawn.", () => checkpoints.withdraw(this.id, item.id), "The promotion was withdrawn.");
  }

  #pin(item) {
    return this.#do("The checkpoint was not pinned.", () => checkpoints.pin(this.id, item.id), `The checkpoint of step ${item.step_number} is pinned: it is kept whatever checkpoints.keep says.`);
  }

  async #unpin(item) {
    const text = `The checkpoint of step ${item.step_number} is then deleted as checkpoints.keep says, at the latest with the next one that is saved.`;
    if (await confirmed("Unpin this checkpoint?", text, "Unpin it")) await this.#do("The checkpoint is still pinned.", () => checkpoints.unpin(this.id, item.id), "The checkpoint is no longer pinned.");
  }

  async #remove(item) {
    const text = `The weights of step ${item.step_number} (${bytes(item.bytes)}) will be gone for good.`;
    if (await confirmed("Delete this checkpoint?", text, "Delete the weights")) await this.#do("The checkpoint was not deleted.", () => checkpoints.remove(this.id, item.id), "The checkpoint was deleted.");
  }

  #do(failure, work, success) {
    return guarded(this.message, failure, async () => {
      await work();
      announce(success);
      await this.load();
    });
  }
}

/** Pinned, promoted, by whom and behind which gates. */
function stateOf({ pinned, promotion: promoted }) {
  if (!promoted) return pinned ? h("span", { class: "badge" }, "pinned") : h("span", { class: "soft" }, "–");
  const gates = Object.entries(promoted.gates).map(([name, value]) => `${GATES[name] ?? name} ${number(value)}`).join(", ");
  return h("div", {}, h("span", { class: "badge succeeded" }, "promoted"), h("div", { class: "soft" }, `${gates}; ${promoted.actor}, ${ago(promoted.promoted_at)}${promoted.note ? `: ${promoted.note}` : ""}`));
}
