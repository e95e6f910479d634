/* Sweeps: the list, and one of them with its members and its reward-KL frontier. */

import { ApiError, sweeps } from "./api.js";
import { announce, button, confirmed, fill, guarded, h, setText } from "./dom.js";
import { ago, count, number } from "./format.js";
import { STATUS_WORDS } from "./names.js";
import { Scatter } from "./scatter.js";

const REFRESH_MS = 5000;
const MOST_COMPARED = 6;

export function show(root, params, page) {
  const view = new SweepView(root, params, page);
  view.loop();
  return () => view.dispose();
}

class SweepView {
  constructor(root, params, page) {
    Object.assign(this, { root, page, id: params.get("id") });
    this.abort = new AbortController();
  }

  dispose() {
    this.abort.abort();
    clearTimeout(this.timer);
    this.scatter?.dispose();
  }

  async loop() {
    let isDone = false;
    try {
      if (this.id) isDone = this.#one(await sweeps.get(this.id, this.abort.signal));
      else if (!document.hidden) this.#list(await sweeps.list({ limit: 100 }, this.abort.signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.page.failed(error, this.message ?? this.root, this.id ? "This sweep cannot be shown." : "The sweeps cannot be shown.");
      if (["key", "missing"].includes(error.kind)) return;
    }
    if (!isDone && !this.abort.signal.aborted) this.timer = setTimeout(() => this.loop(), REFRESH_MS);
  }

  #list({ data }) {
    const rows = data.map((sweep) => h("tr", {}, h("th", { scope: "row" }, h("a", { href: `#/sweeps/${sweep.id}` }, sweep.name ?? sweep.id)), h("td", {}, badge(sweep.status)),
      h("td", {}, count(sweep.data.length, "job")), h("td", {}, sweep.best ? `reward ${number(sweep.best.reward, 3)} at KL ${number(sweep.best.ref_kl, 3)}` : "–"), h("td", { class: "soft" }, ago(sweep.created_at))));
    const start = h("a", { class: "button primary", href: "#/sweeps/new" }, "New sweep");
    fill(this.root, h("div", { class: "titlebar" }, h("h1", {}, "Sweeps"), rows.length ? start : null), rows.length ? h("div", { class: "panel scroll below", tabindex: "0", role: "region", "aria-label": "Table of sweeps" }, table(["Sweep", "Status", "Members", "Best checkpoint", "Created"], rows))
      : h("div", { class: "empty below" }, h("p", {}, "No sweeps yet. A sweep trains the same data with several settings, for example three values of β, and sets them side by side."),
        start));
  }

  /** Draws a sweep; returns whether it has ended. */
  #one(sweep) {
    if (!this.scatter) this.#build(sweep);
    this.badge.className = `badge ${sweep.status}`;
    setText(this.badge, STATUS_WORDS[sweep.status]);
    this.actions.hidden = sweep.is_terminal;
    const rows = sweep.data.map((member) => h("tr", {}, h("th", { scope: "row" }, h("a", { href: `#/jobs/${member.job_id}` }, member.name)), h("td", {}, badge(member.status), member.error ? h("div", { class: "soft" }, member.error.message) : null),
      h("td", {}, `${member.progress.step.toLocaleString()} of ${member.progress.num_steps.toLocaleString()}`), h("td", {}, number(member.applied_beta)), h("td", {}, number(member.ref_kl)), h("td", {}, number(member.reward)),
      h("td", {}, member.best ? `reward ${number(member.best.reward, 3)} at KL ${number(member.best.ref_kl, 3)}, step ${member.best.step}` : "–")));
    fill(this.members, table(["Member", "Status", "Step", "β", "KL", "Reward", "Best checkpoint on the frontier"], rows));
    const names = new Map(sweep.data.map((member, place) => [member.job_id, { label: member.name, colour: place }]));
    const clouds = [...names].map(([job, look]) => ({ ...look, points: sweep.frontier.filter((point) => point.job_id === job && point.ref_kl !== null && point.reward !== null).map((point) => ({ x: point.ref_kl, y: point.reward, step: point.step })) }));
    this.scatter.setData(clouds.filter((cloud) => cloud.points.length));
    setText(this.best, sweep.best ? `Best: ${names.get(sweep.best.job_id)?.label ?? sweep.best.job_id}, step ${sweep.best.step}, reward ${number(sweep.best.reward)} at KL ${number(sweep.best.ref_kl)}.` : "No checkpoint has been measured yet.");
    return sweep.is_terminal;
  }

  #build(sweep) {
    this.page.setTitle(sweep.name ?? sweep.id);
    this.badge = h("span", { class: "badge" });
    this.message = h("div", {});
    this.best = h("p", {});
    this.members = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Members of the sweep" });
    this.scatter = new Scatter({ title: "Checkpoints: reward against KL", description: "Published checkpoints of all members; the ring marks a member's last one. Up and to the left is better." });
    this.actions = h("div", { class: "row", role: "group", "aria-label": "Control of all members" },
      button("Pause all", () => this.#act("pause", "Every member that can be paused is pausing.")), button("Resume all", () => this.#act("resume", "Every paused member is queued again.")),
      button("Cancel all …", () => this.#cancel(sweep), { class: "danger" }));
    const compared = sweep.data.slice(0, MOST_COMPARED).map((member) => member.job_id).join(",");
    fill(this.root, h("div", { class: "titlebar" }, h("div", { class: "row" }, h("h1", {}, sweep.name ?? sweep.id), this.badge), this.actions), this.message,
      h("p", { class: "soft" }, `${sweep.id} · ${count(sweep.data.length, "member")} with the same model, data, seed and reference.`),
      h("section", { class: "panel" }, h("h2", {}, "Members"), this.members, h("div", { class: "row below" }, h("a", { class: "button small", href: `#/compare?jobs=${compared}` }, sweep.data.length > MOST_COMPARED ? `Curves of the first ${MOST_COMPARED}` : "Curves side by side"))),
      this.best, h("div", { class: "charts" }, this.scatter.element));
  }

  #act(verb, sentence) {
    return guarded(this.message, "That was not possible.", async () => {
      this.#one(await sweeps.act(this.id, verb));
      announce(sentence);
    });
  }

  async #cancel(sweep) {
    const text = `Every member of “${sweep.name ?? sweep.id}” that has not ended ends at once, without a further checkpoint.`;
    if (await confirmed("Cancel the whole sweep?", text, "Cancel all members")) await this.#act("cancel", "The sweep is being cancelled.");
  }
}

const badge = (status) => h("span", { class: `badge ${status}` }, STATUS_WORDS[status]);

function table(head, rows) {
  return h("table", {}, h("thead", {}, h("tr", {}, head.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows));
}
