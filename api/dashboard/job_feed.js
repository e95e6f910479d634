/* One job, followed: the job itself, its history, its telemetry. The past comes thinned, the present step by step. */

import { ApiError, jobs } from "./api.js";
import { toNumber } from "./format.js";
import { fromBuckets, LIMIT, Series } from "./series.js";
import { follow, pause } from "./sse.js";

const PULSE_MS = 2000;
const BUCKETS = 160;
const EVENTS = 1000;

/**
 * `handlers`: onJob(job), onEvents(newEvents, areOlder, hasOlder), onSteps(), onState(word, error?), onError(error).
 * `wants(name)` says which metrics are drawn; `first` are fetched before the others.
 * One stream at most: a browser opens few connections to a server. It is closed while the tab is hidden and goes on after.
 */
export class JobFeed {
  constructor(id, handlers, { wants, first }) {
    Object.assign(this, { id, handlers, wants, first });
    this.series = new Map();
    this.detail = null;
    this.abort = new AbortController();
    this.isPaused = false;
    this.lastEvent = "";
    this.firstEvent = "";
    this.onVisibility = () => (document.hidden ? this.#stopStream() : this.#startStream());
    document.addEventListener("visibilitychange", this.onVisibility);
  }

  /** Load what there is, as often as it takes; then follow. */
  async open() {
    const { signal } = this.abort;
    for (let isLoaded = false; !isLoaded;) {
      try {
        await this.#readJob();
        await Promise.all([this.lastEvent ? null : this.olderEvents(), this.#load()]);
        isLoaded = true;
      } catch (error) {
        if (this.#isFatal(error)) return;
        await pause(PULSE_MS, signal);
      }
    }
    this.#startStream();
    this.#pulse();
  }

  dispose() {
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.abort.abort();
    this.#stopStream();
  }

  /** Stop following, so that the picture stands still; nothing is lost meanwhile. */
  setPaused(isPaused) {
    this.isPaused = isPaused;
    if (isPaused) {
      this.#stopStream();
      this.handlers.onState("paused");
    } else {
      this.#startStream();
    }
  }

  /** The values of a metric: finer ones inside the stretch that was zoomed into. */
  lookup(name, range) {
    const { detail } = this;
    const isInside = detail && range && range[0] >= detail.range[0] && range[1] <= detail.range[1];
    return (isInside ? detail.series.get(name) : null) ?? this.series.get(name);
  }

  /** Fetch a stretch more finely; null forgets it. */
  async zoom(range) {
    this.zoomed?.abort();
    if (!range || !(this.isThinned || this.job.progress.step > LIMIT)) {
      this.detail = null;
      return;
    }
    this.zoomed = new AbortController();
    const [from, to] = [Math.max(1, Math.floor(range[0])), Math.ceil(range[1])];
    const values = { names: [...this.series.keys()].join(","), global_step_from: from, global_step_to: to, resolution: BUCKETS };
    try {
      const answer = await jobs.metrics(this.id, values, this.zoomed.signal);
      this.detail = { range: [from, to], series: collect(answer) };
      this.handlers.onSteps();
    } catch (error) {
      if (error.name !== "AbortError") this.handlers.onError(error);
    }
  }

  /** The page of history before what is known. */
  async olderEvents() {
    const answer = await jobs.events(this.id, { limit: EVENTS, order: "desc", after: this.firstEvent }, this.abort.signal);
    if (answer.data.length === 0) return;
    this.firstEvent = answer.last_id;
    this.lastEvent ||= answer.first_id;
    this.handlers.onEvents(answer.data.reverse(), true, answer.has_more);
  }

  /** Read the job and what is new in its history at once, for example after an action. */
  async refresh() {
    await this.#readJob();
    const answer = await jobs.events(this.id, { limit: EVENTS, order: "asc", after: this.lastEvent || "ftevent-0" }, this.abort.signal);
    if (answer.data.length) {
      this.lastEvent = answer.last_id;
      this.handlers.onEvents(answer.data, false);
    }
    if (!this.stream && !this.isDone) this.#startStream();
  }

  async #readJob() {
    this.job = await jobs.get(this.id, this.abort.signal);
    this.handlers.onJob(this.job);
  }

  /** The newest step whole, and the past of the main curves, at once; then the past of the other metrics it has. */
  async #load() {
    const { step } = this.job.progress;
    if (step === 0) return;
    const [newest] = await Promise.all([
      jobs.metrics(this.id, { global_step_from: step, global_step_to: step, limit: 1 }, this.abort.signal), this.#past([...this.first], step)]);
    const row = newest.data[0];
    if (!row) return;
    this.position = `${row.epoch}-${row.seq}`;
    this.newest = row.metrics;
    this.isThinned = step > BUCKETS;
    await this.#past(Object.keys(row.metrics).filter((name) => this.wants(name) && !this.first.has(name)), step);
  }

  async #past(names, step) {
    if (!names.length) return;
    const answer = await jobs.metrics(this.id, { names: names.join(","), global_step_to: step, resolution: BUCKETS }, this.abort.signal);
    for (const [name, series] of collect(answer)) this.series.set(name, series);
    this.handlers.onSteps();
  }

  #startStream() {
    if (this.stream || this.isPaused || document.hidden || this.isDone || this.abort.signal.aborted) return;
    this.stream = new AbortController();
    const { signal } = this.stream;
    follow(jobs.path(this.id, "/metrics/stream"), {
      lastId: this.position, signal,
      onEvent: (event) => this.#take(event),
      onState: (word, error) => {
        if (signal.aborted) return;
        this.isDone = word === "done";
        this.handlers.onState(word, error);
        if (this.isDone) this.#settle();
      },
    });
  }

  #stopStream() {
    this.stream?.abort();
    this.stream = null;
  }

  async #settle() {
    try {
      await this.refresh();
    } catch (error) {
      this.#isFatal(error);
    }
  }

  #take({ id, event, data }) {
    this.position = id ?? this.position;
    if (event === "run.rewound") {
      for (const series of this.#all()) series.truncate(data.to_step);
    } else if (event === "step.completed") {
      for (const [name, raw] of Object.entries(data.metrics)) {
        if (!this.wants(name)) continue;
        if (!this.series.has(name)) this.series.set(name, new Series());
        this.series.get(name).append(data.step, toNumber(raw));
        const detail = this.detail?.series.get(name);
        if (detail && data.step <= this.detail.range[1]) detail.append(data.step, toNumber(raw));
      }
      this.lastStep = data;
    } else return;
    this.handlers.onSteps();
  }

  * #all() {
    yield* this.series.values();
    if (this.detail) yield* this.detail.series.values();
  }

  /** The job and its history every two seconds while somebody looks and something can still happen. */
  async #pulse() {
    const { signal } = this.abort;
    while (!signal.aborted) {
      await pause(PULSE_MS, signal);
      if (signal.aborted || document.hidden || this.isPaused || (this.isDone && this.job?.is_terminal)) continue;
      try {
        await this.refresh();
      } catch (error) {
        if (this.#isFatal(error)) return;
      }
    }
  }

  /** Reports an error; true when following makes no sense any more. */
  #isFatal(error) {
    if (error.name === "AbortError") return true;
    if (!(error instanceof ApiError)) throw error;
    const isFatal = ["key", "scope", "missing"].includes(error.kind);
    this.handlers.onError(error, isFatal);
    if (isFatal) this.dispose();
    return isFatal;
  }
}

function collect(answer) {
  return new Map(answer.data.filter((series) => series.buckets.length).map((series) => [series.name, fromBuckets(series.buckets)]));
}
