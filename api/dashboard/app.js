/* The frame: which page is shown, the API key, and whether the server answers. */

import { ApiError, request, session, watchReachable } from "./api.js";
import { button, fill, h, notice, uniqueId } from "./dom.js";
import { pause } from "./sse.js";

const PROBE_MS = 2000;
const VIEWS = {
  jobs: { load: () => import("./jobs_view.js"), title: "Jobs" },
  job: { load: () => import("./job_view.js"), title: "Job" },
  fork: { load: () => import("./fork_view.js"), title: "Fork" },
  rollouts: { load: () => import("./rollouts_view.js"), title: "Rollouts" },
  compare: { load: () => import("./compare_view.js"), title: "Compare" },
  sweeps: { load: () => import("./sweep_view.js"), title: "Sweeps" },
  "new sweep": { load: () => import("./new_sweep_view.js"), title: "New sweep" },
  new: { load: () => import("./new_job_view.js"), title: "New job" },
};
const PARTS = new Set(["rollouts", "fork"]);
const HOMES = { job: "jobs", rollouts: "jobs", fork: "jobs", "new sweep": "sweeps" };

const main = document.getElementById("main");
const offline = document.getElementById("offline");
let dispose = () => {};
let shown = "";

/** `#/jobs/ID?x=y`, `#/jobs/ID/PART?x=y` → the view, its id and its parameters. */
function route(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?");
  const [name, id, part] = path.split("/").map(decoded);
  const params = new URLSearchParams(search);
  if (name === "sweeps" && id === "new") return { name: "new sweep", params };
  if (id) params.set("id", id);
  if (name !== "jobs" || !id) return { name: name || "jobs", params };
  return { name: part === undefined ? "job" : PARTS.has(part) ? part : "", params };
}

/** A part of the address as text; one that is badly escaped as it stands. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch (error) {
    if (!(error instanceof URIError)) throw error;
    return part;
  }
}

/** What views may ask of the frame. */
const page = {
  /** Show an API error where the content would be; a wrong key is asked for right there. */
  failed(error, place, sentence) {
    if (error.kind === "key") return fill(place, keyForm(error.message));
    if (error.kind === "offline") {
      setOffline(true);
      return place === main ? showAgain() : undefined;
    }
    return fill(place, notice("error", sentence, error.message));
  },
  setTitle(text) { document.title = `${text} · GRPO training`; },
  show,
};

async function show() {
  const { name, params } = route(location.hash);
  const view = VIEWS[name];
  dispose();
  dispose = () => {};
  const turn = (shown = location.hash + Math.random());
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.dataset.view === (HOMES[name] ?? name);
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!view) {
    fill(main, h("h1", {}, "No such page"), h("p", {}, "This address leads nowhere. ", h("a", { href: "#/jobs" }, "Go to the list of jobs.")));
    return;
  }
  page.setTitle(view.title);
  fill(main, h("p", { class: "soft" }, "Loading …"));
  try {
    const module = await view.load();
    if (turn === shown) dispose = module.show(main, params, page);
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    fill(main, notice("error", "This page could not be loaded.", "The server does not answer. Start it again (grpo up), then reload."));
    console.error(error);
  }
}

/** Once the server answers again, show the view that could not be shown. */
async function showAgain() {
  const turn = shown;
  for (;;) {
    await pause(PROBE_MS);
    if (turn !== shown) return;
    try {
      await request("/healthz");
      return void show();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
    }
  }
}

function setOffline(isOff) {
  if (offline.hidden === !isOff) return;
  offline.hidden = !isOff;
  fill(offline, isOff ? "The server does not answer. Start it again (grpo up); this page goes on by itself once it does." : "");
}

/** A form for the key; `reason` says why it is asked for. */
function keyForm(reason) {
  const id = uniqueId("key");
  const input = h("input", { id, type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": `${id}-note` });
  const submit = (event) => {
    event.preventDefault();
    session.key = input.value.trim();
    for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
    show();
  };
  return h("form", { class: "key-form", on: { submit } },
    reason ? notice("warn", "", reason) : null,
    h("label", { for: id }, "API key"), input,
    h("p", { id: `${id}-note`, class: "hint" }, "Kept in this browser tab until it is closed, and sent to this server only."),
    h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Use this key"),
      session.key ? button("Forget the key", () => { session.key = ""; for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close(); show(); }) : null));
}

document.getElementById("key-button").addEventListener("click", () => {
  const heading = uniqueId("dialog");
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": heading }, h("h2", { id: heading }, "API key"), keyForm(""));
  dialog.append(h("div", { class: "row end" }, button("Close", () => dialog.close())));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
});

document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
watchReachable((isReachable) => setOffline(!isReachable));
window.addEventListener("hashchange", () => { show(); main.focus({ preventScroll: true }); window.scrollTo(0, 0); });
show();
