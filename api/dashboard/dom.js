/* Building the page without markup in strings: every text becomes a text node, so data can never become markup. */

import { ApiError } from "./api.js";

/** An element. `attributes`: `class`, `dataset` and `on` (event listeners) are special; true sets, false and null leave out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [type, listener] of Object.entries(value)) element.addEventListener(type, listener);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

/** Append nodes and texts; null and false are left out, arrays are opened. */
export function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Set an element's text only when it differs, so that nothing is announced or laid out twice. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  append(element, children);
  return element;
}

/** A button. */
export function button(label, listener, attributes = {}) {
  return h("button", { type: "button", ...attributes, on: { click: listener } }, label);
}

/** A sentence in a box. `level`: info, warn or error; errors are announced at once, warnings when there is time. */
export function notice(level, title, ...children) {
  const role = { error: "alert", warn: "status" }[level];
  return h("div", { class: `notice ${level}`, role }, title && h("strong", {}, title), " ", ...children);
}

let counter = 0;
/** An id no other element has. */
export function uniqueId(prefix) {
  counter += 1;
  return `${prefix}-${counter}`;
}

/** Ask before something that cannot be undone; resolves to true only on the button that says what will be done. */
export function confirmed(title, text, action) {
  return new Promise((resolve) => {
    const heading = uniqueId("dialog");
    const dialog = h("dialog", { "aria-labelledby": heading, class: "dialog" });
    const answer = (value) => { dialog.close(); dialog.remove(); resolve(value); };
    dialog.append(
      h("h2", { id: heading }, title),
      h("p", {}, text),
      h("div", { class: "row end" },
        button("Leave it as it is", () => answer(false), { autofocus: true }),
        button(action, () => answer(true), { class: "danger" })),
    );
    dialog.addEventListener("cancel", (event) => { event.preventDefault(); answer(false); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** What goes wrong in a part of the page is said in that part. */
export async function guarded(place, sentence, work) {
  try {
    fill(place);
    return await work();
  } catch (error) {
    if (error.name === "AbortError") return undefined;
    if (!(error instanceof ApiError)) throw error;
    fill(place, notice("error", sentence, error.message));
    return undefined;
  }
}

/** Say something to screen readers without moving the focus. */
export function announce(text) {
  setText(document.getElementById("announcer"), text);
}
