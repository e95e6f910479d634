/* The lower part of a job's page: events, log, settings. */

import { jobs, request } from "./api.js";
import { append, button, fill, guarded, h, setText } from "./dom.js";
import { saveText } from "./download.js";
import { bytes, time } from "./format.js";

const SHOWN_EVENTS = 300;
const KEPT_EVENTS = 5000;
const LOG_LINES = 400;
const LOG_MS = 3000;

/** The history, newest first. */
export class EventsPanel {
  constructor(feed) {
    this.feed = feed;
    this.events = [];
    this.level = h("select", { id: "event-level", on: { change: () => this.#render() } },
      h("option", { value: "" }, "all"), h("option", { value: "warn" }, "warnings and errors"));
    this.message = h("div", {});
    this.list = h("ol", { class: "events", reversed: true, tabindex: "0", "aria-label": "Events, newest first" });
    this.older = button("Load older events", () => this.#loadOlder(), { class: "small", hidden: true });
    this.element = h("section", { class: "panel", "aria-labelledby": "events-title" },
      h("div", { class: "titlebar" }, h("h2", { id: "events-title" }, "Events"), h("label", { class: "soft" }, "Show ", this.level)),
      this.message, this.list, this.older);
  }

  /** Take events in ascending order, before or after those known. */
  add(events, areOlder, hasOlder) {
    this.events = areOlder ? [...events, ...this.events] : [...this.events, ...events].slice(-KEPT_EVENTS);
    if (areOlder) this.older.hidden = !hasOlder;
    this.#render();
  }

  #render() {
    const chosen = this.level.value ? this.events.filter((event) => event.level !== "info") : this.events;
    const shown = chosen.slice(-SHOWN_EVENTS).reverse();
    fill(this.list, shown.length ? shown.map((event) => this.#row(event)) : h("li", { class: "soft" }, "Nothing yet."));
  }

  #row(event) {
    const step = event.step === null ? "" : ` · step ${event.step.toLocaleString()}`;
    const level = event.level === "info" ? null : h("span", { class: "level" }, event.level === "warn" ? "Warning: " : "Error: ");
    return h("li", { class: event.level },
      h("div", { class: "soft" }, time(event.created_at), " · ", h("code", {}, event.event), step), level, event.message);
  }

  #loadOlder() {
    return guarded(this.message, "Older events could not be read.", async () => {
      await this.feed.olderEvents();
    });
  }
}

/** The engine's log; read again every few seconds while it is open. */
export class LogPanel {
  constructor(id, getJob) {
    this.getJob = getJob;
    this.id = id;
    this.message = h("div", {});
    this.text = h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Engine log, last lines" }, "");
    this.attempt = h("span", { class: "soft" });
    this.details = h("details", { on: { toggle: () => this.#loop() } }, h("summary", {}, "Show the last lines"),
      h("div", { class: "row" }, this.attempt, button("Save the whole log", () => this.#save(), { class: "small" })), this.message, this.text);
    this.element = h("section", { class: "panel", "aria-labelledby": "log-title" }, h("h2", { id: "log-title" }, "Engine log"), this.details);
  }

  dispose() { clearTimeout(this.timer); this.isGone = true; }

  async #loop() {
    clearTimeout(this.timer);
    if (!this.details.open || this.isGone) return;
    if (!document.hidden) await this.#read();
    if (!this.getJob()?.is_terminal || !this.wasRead) this.timer = setTimeout(() => this.#loop(), LOG_MS);
  }

  async #read() {
    const job = this.getJob();
    if (!job || job.attempt === 0) return setText(this.text, "No attempt has started yet; the log begins with the first.");
    return guarded(this.message, "The log could not be read.", async () => {
      const answer = await request(jobs.path(this.id, `/logs?tail=${LOG_LINES}`)).catch((error) => {
        if (error.kind === "missing") return null;
        throw error;
      });
      if (!answer) return setText(this.text, "The engine has printed nothing yet.");
      const text = await answer.text();
      const isAtEnd = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 8;
      setText(this.attempt, `attempt ${answer.headers.get("x-attempt")}, ${bytes(Number(answer.headers.get("x-log-bytes")))}`);
      setText(this.text, text || "The engine has printed nothing yet.");
      if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
      this.wasRead = true;
      return undefined;
    });
  }

  #save() {
    return guarded(this.message, "The log could not be saved.", async () => {
      const answer = await request(jobs.path(this.id, "/logs?tail=100000"));
      saveText(await answer.text(), `${this.id}.log`, "text/plain");
    });
  }
}

/** What the job was made from. */
export function settingsPanel(job) {
  const text = JSON.stringify({ model: job.model, training_file: job.training_file, seed: job.seed, suffix: job.user_provided_suffix, metadata: job.metadata, method: job.method }, null, 2);
  const facts = [["Job", job.id], ["Model", job.model], ["Training file", job.training_file ?? "–"], ["Created", time(job.created_at)], ["Started", time(job.started_at)],
    ["Ended", time(job.finished_at)], ["Attempt", String(job.attempt)], ["Reference", job.kl?.reference ? `${job.kl.reference.model} ${job.kl.reference.sha256?.slice(0, 12) ?? ""}` : "–"]];
  const section = h("section", { class: "panel", "aria-labelledby": "settings-title" }, h("h2", { id: "settings-title" }, "Settings"));
  append(section, [
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", { class: "soft" }, name), h("dd", {}, value)))),
    h("details", {}, h("summary", {}, "All settings as they were resolved"), h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Resolved settings" }, text)),
    h("div", { class: "row" }, button("Save as JSON", () => saveText(text, `${job.id}.json`), { class: "small" }),
      h("a", { class: "button small", href: `#/new?from=${encodeURIComponent(job.id)}` }, "New job from these settings"),
      h("a", { class: "button small", href: `#/sweeps/new?from=${encodeURIComponent(job.id)}` }, "Sweep over these settings"),
      h("a", { class: "button small", href: `#/jobs/${job.id}/fork` }, "Fork from a checkpoint")),
  ]);
  return section;
}

/** Where the weights come from and what was started from them; null when there is neither. */
export function lineageLine({ lineage, resolved }) {
  const { parent_job: parent, parent_checkpoint: checkpoint, root_model: root, forks } = lineage;
  const link = (id) => h("a", { href: `#/jobs/${id}` }, id);
  if (!checkpoint && !forks.length) return null;
  const from = checkpoint ? ["Started from ", h("code", {}, checkpoint), parent ? [" of ", link(parent)] : null, `; the line began with ${root}, KL is measured against ${resolved.reference.source}. `] : null;
  const to = forks.length ? ["Forks: ", forks.map((id, index) => [index ? ", " : "", link(id)]), "."] : null;
  return h("p", { class: "soft lineage" }, from, to);
}
