/* The page of one job: where it stands, its curves, its control, its history. */

import { CheckpointsPanel } from "./checkpoints_panel.js";
import { announce, append, button, fill, h, notice, setText } from "./dom.js";
import { duration, number, toNumber } from "./format.js";
import { chartsOf, firstNames, JobCharts, wanted } from "./job_charts.js";
import { ActionButtons, ControlPanel } from "./job_control.js";
import { JobFeed } from "./job_feed.js";
import { EventsPanel, LogPanel, lineageLine, settingsPanel } from "./job_panels.js";
import { klName, ruleSentence, STATUS_WORDS, title } from "./names.js";

const ALARMS = new Set(["detector.fired", "guardrail.acted", "step.quarantined", "checkpoint.failed", "grader.failed"]);
const MOST_ALARMS = 500;
const LIVE_WORDS = { live: "live", waiting: "connection lost, trying again", paused: "standing still", done: "complete", refused: "not followed", loading: "loading" };
const REMEDIES = {
  config_error: "Correct the setting and start a new job from these settings.",
  nonfinite: "Lower the learning rate or raise β, and start a new job from these settings.",
  out_of_memory: "Lower group_size, max_completion_tokens or resources.micro_batch_tokens and start a new job.",
  grader: "Try the grader on a sample (POST /v1/fine_tuning/alpha/graders/run), repair it and start a new job.",
  reference_mismatch: "The reference weights changed since the job began; restore them, or start a new job.",
};
const GENERAL_REMEDY = "The events and the end of the engine log below say what happened before.";

export function show(root, params, page) {
  const view = new JobView(root, params, page);
  return () => view.dispose();
}

class JobView {
  constructor(root, params, page) {
    const id = params.get("id");
    Object.assign(this, { root, id, page });
    this.zoomed = rangeOf(params.get("steps"));
    this.alarms = [];
    const handlers = {
      onJob: (job) => this.#job(job),
      onEvents: (events, areOlder, hasOlder) => this.#events(events, areOlder, hasOlder),
      onSteps: () => this.#steps(),
      onState: (word, error) => this.#live(word, error),
      onError: (error, isFatal) => this.#error(error, isFatal),
    };
    this.feed = new JobFeed(id, handlers, { wants: (name) => this.wants?.(name) ?? false, first: new Set() });
    this.feed.open();
  }

  dispose() {
    this.feed.dispose();
    this.charts?.dispose();
    this.log?.dispose();
    cancelAnimationFrame(this.frame);
  }

  #build(job) {
    const getJob = () => this.feed.job;
    const definitions = chartsOf(job);
    this.wants = wanted(definitions);
    this.feed.first = firstNames(job);
    this.charts = new JobCharts(job, this.feed);
    this.charts.build(definitions);
    this.charts.setLoading(job.progress.step > 0);
    this.charts.onZoom = (range) => this.#zoomedTo(range);
    this.charts.onPoint = (step) => { if (step !== null) this.#offerRollouts(step); };
    this.actions = new ActionButtons(getJob, () => this.feed.refresh());
    this.control = new ControlPanel(getJob);
    this.eventsPanel = new EventsPanel(this.feed);
    this.log = new LogPanel(job.id, getJob);
    this.checkpoints = new CheckpointsPanel(job.id);
    this.settings = h("div", {});
    this.badge = h("span", { class: "badge" });
    this.where = h("p", { class: "soft" });
    this.bar = h("progress", { max: 1, value: 0, "aria-label": "Progress of the job" });
    this.verdict = h("div", {});
    this.trouble = h("div", {});
    this.tiles = Object.fromEntries(["KL to the reference", "β", "Reward", "Step time", "Left"].map((name) => [name, [h("span", {}, "–"), h("small", {})]]));
    this.liveWord = h("span", { class: "live-dot", role: "status" }, LIVE_WORDS.loading);
    this.hold = button("Stand still", () => this.#toggle(), { class: "small", "aria-pressed": "false" });
    this.whole = button("Show the whole run", () => this.charts.group.zoom(null), { class: "small", hidden: true });
    this.rollouts = h("a", { class: "button small", href: `#/jobs/${job.id}/rollouts` }, "Rollouts of the latest step");
    this.lineage = h("div", {});
    this.page.setTitle(title(job));
    fill(this.root,
      h("div", { class: "titlebar" }, h("div", { class: "row" }, h("h1", {}, title(job)), this.badge), this.actions.element),
      this.actions.message, this.verdict, this.trouble, this.where, this.lineage, this.bar,
      h("dl", { class: "tiles" }, Object.entries(this.tiles).map(([name, nodes]) => h("div", {}, h("dt", {}, name), h("dd", {}, nodes)))),
      h("div", { class: "livebar" }, this.liveWord, this.hold, this.whole, this.rollouts,
        h("span", { class: "hint" }, "Drag over a chart to zoom, double-click for the whole run. Keys: arrows, +, −, 0.")),
      h("h2", { class: "visually-hidden" }, "Main curves"), this.charts.element,
      h("div", { class: "two" }, this.control.element, this.eventsPanel.element),
      h("h2", { class: "section" }, "More curves"), this.charts.more,
      h("div", { class: "section" }), this.checkpoints.element, this.log.element, this.settings);
    this.control.load(this.feed.abort.signal);
    this.checkpoints.load(this.feed.abort.signal);
  }

  #job(job) {
    if (!this.charts) this.#build(job);
    if (this.badge.textContent && this.badge.textContent !== STATUS_WORDS[job.status]) announce(`The job is ${STATUS_WORDS[job.status]}.`);
    this.badge.className = `badge ${job.status}`;
    setText(this.badge, STATUS_WORDS[job.status]);
    this.charts.job = job;
    this.actions.update(job);
    this.control.update(job);
    setText(this.where, this.#whereText(job));
    this.bar.value = job.progress.num_steps ? job.progress.step / job.progress.num_steps : 0;
    const key = [job.status, job.attempt, job.kl?.reference?.sha256, job.lineage.forks.length].join();
    if (key !== this.settingsKey) {
      this.settingsKey = key;
      fill(this.settings, settingsPanel(job));
      fill(this.lineage, lineageLine(job));
      this.#verdict(job);
    }
    this.#tiles(job);
  }

  #whereText(job) {
    const { step, num_steps: total } = job.progress;
    const parts = [title(job) === job.id ? null : job.id, job.model, `step ${step.toLocaleString()} of ${total.toLocaleString()}`];
    if (job.queue) parts.push(job.queue.ahead ? `${job.queue.ahead} ahead in the queue` : "next in the queue");
    else if (job.status === "running") parts.push(job.phase.replaceAll("_", " "));
    if (job.attempt > 1) parts.push(`attempt ${job.attempt}`);
    return `${parts.filter(Boolean).join(" · ")}. ${ruleSentence(job.resolved.beta)}`;
  }

  #verdict(job) {
    fill(this.verdict);
    if (job.status === "failed") {
      const { code, message, param } = job.error ?? { code: "unknown", message: job.status_reason ?? "no reason was recorded", param: null };
      append(this.verdict, [notice("error", `The job failed (${code}).`, message, param ? ` Setting: ${param}.` : "", ` ${REMEDIES[code] ?? GENERAL_REMEDY}`)]);
    } else if (job.status === "cancelled") append(this.verdict, [notice("warn", "The job was cancelled.", job.status_reason ?? "")]);
    else if (job.status === "succeeded") append(this.verdict, [notice("info", "The job is done.", job.fine_tuned_model ? `Its model is ${job.fine_tuned_model}.` : "")]);
    else if (job.status === "paused") append(this.verdict, [notice("warn", "The job is paused.", "It goes on from its checkpoint when resumed.")]);
  }

  #tiles(job) {
    const look = (name) => this.feed.series.get(name)?.last ?? toNumber(this.feed.newest?.[name]);
    const set = (name, value, note) => {
      setText(this.tiles[name][0], value);
      setText(this.tiles[name][1], note);
    };
    const { kl } = job;
    const target = toNumber(kl?.target);
    const unit = job.resolved.beta.unit === "sequence" ? "per completion" : "per token";
    set("KL to the reference", number(look(klName(job)) ?? kl?.ref_kl), target === null ? "nats per token" : `target ${number(target)} ${unit}`);
    set("β", number(look("beta/applied") ?? kl?.beta), job.resolved.beta.rule);
    set("Reward", number(look("reward/mean")), "mean over completions");
    set("Step time", look("time/step_s") === null ? "–" : `${number(look("time/step_s"), 3)} s`, look("throughput/tokens_per_s") === null ? "" : `${number(look("throughput/tokens_per_s"), 3)} tokens/s`);
    const left = job.progress.eta && !job.is_terminal ? job.progress.eta - Date.now() / 1000 : null;
    set("Left", job.is_terminal ? "0" : duration(left), job.is_terminal ? STATUS_WORDS[job.status] : "");
  }

  #events(events, areOlder, hasOlder) {
    this.eventsPanel.add(events, areOlder, hasOlder);
    const alarms = events.filter((event) => ALARMS.has(event.event) && event.step !== null)
      .map((event) => ({ step: event.step, kind: "alarm", level: event.level, text: event.message }));
    if (alarms.length) {
      this.alarms = (areOlder ? [...alarms, ...this.alarms] : [...this.alarms, ...alarms]).slice(-MOST_ALARMS);
      this.charts.setAlarms(this.alarms);
    }
    if (areOlder) return;
    const kinds = new Set(events.map((event) => event.event));
    if (kinds.has("checkpoint.saved") || kinds.has("checkpoint.deleted")) this.checkpoints.load();
    if ([...kinds].some((kind) => kind.startsWith("control.")) || this.control.isWaiting) this.control.load();
    const loud = events.filter((event) => event.level === "error" || event.event === "control.applied").at(-1);
    if (loud) announce(loud.message);
  }

  #zoomedTo(range) {
    this.whole.hidden = !range;
    history.replaceState(null, "", `#/jobs/${this.id}${range ? `?steps=${Math.floor(range[0])}-${Math.ceil(range[1])}` : ""}`);
  }

  /** The step last pointed at stays offered, so that the link can be reached. */
  #offerRollouts(step) {
    const whole = Math.round(step);
    this.rollouts.setAttribute("href", `#/jobs/${this.id}/rollouts?step=${whole}`);
    setText(this.rollouts, `Rollouts of step ${whole.toLocaleString()}`);
  }

  /** New numbers; drawn at most once a frame. */
  #steps() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.charts.update();
      const { job, lastStep } = this.feed;
      if (lastStep && lastStep.step > job.progress.step) {
        job.progress.step = lastStep.step;
        setText(this.where, this.#whereText(job));
        this.bar.value = lastStep.step / job.progress.num_steps;
      }
      this.#tiles(job);
    });
  }

  #live(word, error) {
    this.liveWord.className = `live-dot ${word}`;
    setText(this.liveWord, LIVE_WORDS[word]);
    this.hold.hidden = word === "done";
    if (word !== "loading") this.charts.setLoading(false);
    if (word !== "loading" && this.zoomed) {
      this.charts.group.zoom(this.zoomed);
      this.zoomed = null;
    }
    if (word === "refused") fill(this.trouble, notice("error", "This job cannot be followed.", error.message));
  }

  #toggle() {
    const isHeld = !this.feed.isPaused;
    this.feed.setPaused(isHeld);
    this.hold.setAttribute("aria-pressed", String(isHeld));
    setText(this.hold, isHeld ? "Follow again" : "Stand still");
  }

  #error(error, isFatal) {
    if (isFatal && error.kind === "missing") {
      fill(this.root, h("h1", {}, "No such job"), notice("error", "", error.message), h("p", {}, h("a", { href: "#/jobs" }, "Go to the list of jobs.")));
    } else if (isFatal) this.page.failed(error, this.root, "The job cannot be shown.");
    else if (error.kind !== "offline" && this.trouble) fill(this.trouble, notice("warn", "Something could not be read.", error.message));
  }
}

/** `120-180` as steps; null for anything else. */
function rangeOf(text) {
  const found = /^(\d{1,9})-(\d{1,9})$/.exec(text ?? "");
  return found ? [Number(found[1]), Number(found[2])] : null;
}
