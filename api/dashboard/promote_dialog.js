/* Promotion: the gates a checkpoint must pass, with what it reads, asked for in a dialog. */

import { ApiError } from "./api.js";
import { button, fill, h, notice, setText, uniqueId } from "./dom.js";
import { number, toNumber } from "./format.js";
import { typedNumber } from "./schema.js";

const GATES = {
  max_ref_kl: { label: "KL at most", unit: "nats per token", reading: "ref_kl" },
  min_reward: { label: "Reward at least", unit: "mean", reading: "reward" },
  max_beta: { label: "β at most", unit: "", reading: "beta" },
  min_step: { label: "Step at least", unit: "", reading: "step" },
};

/** Ask for the gates and call `send({gates, note})`; resolves to whether the checkpoint was promoted. A refusal is said at its gate. */
export function promotion(item, send) {
  return new Promise((resolve) => {
    const heading = uniqueId("dialog");
    const message = h("div", {});
    const fields = Object.fromEntries(Object.entries(GATES).map(([name, gate]) => [name, field(gate, item)]));
    const noteId = uniqueId("note");
    const note = h("input", { id: noteId, maxlength: "512", autocomplete: "off" });
    const answer = (value) => { dialog.close(); dialog.remove(); resolve(value); };
    const submit = async (event) => {
      event.preventDefault();
      fill(message);
      const gates = read(fields);
      if (!gates) return;
      if (!Object.keys(gates).length) return void fields.max_ref_kl.say("Give at least one gate; the checkpoint is promoted only if it passes all of them.");
      try {
        await send({ gates, ...(note.value.trim() ? { note: note.value.trim() } : {}) });
        answer(true);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        const place = fields[(error.param ?? "").replace(/^gates\./, "")];
        if (place) place.say(error.message);
        else fill(message, notice("error", "Not promoted.", error.message));
      }
    };
    const dialog = h("dialog", { class: "dialog", "aria-labelledby": heading },
      h("h2", { id: heading }, `Promote the checkpoint of step ${item.step_number.toLocaleString()}`),
      h("p", {}, "It must pass every gate you set, and every file must be as it was written. It is pinned from then on and stands first among the models."),
      h("form", { novalidate: true, on: { submit } }, message, h("div", { class: "fields" }, Object.values(fields).map(({ element }) => element)),
        h("div", { class: "field" }, h("label", { for: noteId }, "Note"), note),
        h("div", { class: "row end" }, button("Leave it as it is", () => answer(false)), h("button", { type: "submit", class: "primary" }, "Promote if it passes"))));
    dialog.addEventListener("cancel", (event) => { event.preventDefault(); answer(false); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

function field({ label, unit, reading }, item) {
  const id = uniqueId("gate");
  const error = h("p", { class: "error", id: `${id}-error`, hidden: true });
  const value = toNumber(item.metrics[reading]);
  const input = h("input", { id, inputmode: "decimal", autocomplete: "off", placeholder: "no gate", "aria-describedby": `${id}-hint`, on: { input: () => say("") } });
  const say = (text) => {
    error.hidden = !text;
    setText(error, text);
    if (text) { input.setAttribute("aria-invalid", "true"); input.setAttribute("aria-errormessage", error.id); input.focus(); } else { input.removeAttribute("aria-invalid"); input.removeAttribute("aria-errormessage"); }
  };
  const element = h("div", { class: "field" }, h("label", { for: id }, label), input, h("p", { class: "hint", id: `${id}-hint` }, value === null ? "It has no reading." : `It reads ${number(value)} ${unit}`.trim()), error);
  return { element, input, say };
}

/** The gates typed in; null when one is no number, which is said there. */
function read(fields) {
  const gates = {};
  for (const [name, { input, say }] of Object.entries(fields)) {
    const value = typedNumber(input.value);
    if (typeof value === "string") {
      say(`“${input.value}” is not a number; write it like 0.02.`);
      return null;
    }
    if (value !== undefined) gates[name] = value;
  }
  return gates;
}
