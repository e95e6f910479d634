/* Which charts a job has, and what is drawn in each. */

import { Chart, ChartGroup } from "./chart.js";
import { append, h } from "./dom.js";
import { bandOf, ESTIMATORS, klName, targetBand } from "./names.js";

const MAIN = 3;
const MANY_ACTIONS = 80;
const FAMILY = "reward/grader/";
const SMOOTHED = ["beta/ema", "smoothed, what the rule compares", { faint: true, colour: 5, dash: 3 }];
const TIMES = { sample: "sampling", grade: "grading", reference: "reference", update: "update", evaluate: "held-out file", checkpoint: "checkpoint" };

/** The charts of a job: {title, unit, lines: [[metric, label, options]], …}. The job's own estimator comes first. */
export function chartsOf(job) {
  const { kl, beta } = job.resolved;
  const own = kl.estimator;
  const estimators = [own, ...ESTIMATORS.filter((name) => name !== own)];
  const perSequence = beta.unit === "sequence";
  const isSteered = bandOf(beta) !== null;
  const named = (names) => names.map(([name, label, options]) => [name, label, options ?? {}]);
  return [
    {
      id: "kl", title: "KL to the reference", unit: "nats/token", canLog: true, hasAlarms: true, hasBand: isSteered && !perSequence,
      description: describeKl(job),
      lines: [...estimators.map((name) => [`kl/ref/${name}/mean`, name === own ? `${name} (this job's)` : name, { faint: name !== own }]),
        ...(isSteered && !perSequence ? [SMOOTHED] : [])],
    },
    {
      id: "beta", title: "β", unit: "", canLog: true, hasAlarms: true, hasActions: true, withZero: true,
      description: isSteered ? "Arrows: the rule raised or lowered β." : "",
      lines: [["beta/applied", "β", { isStepped: true, colour: 1, dash: 0 }]],
    },
    {
      id: "reward", title: "Reward", unit: "", hasAlarms: true, description: "Shaded: mean spread within a group.",
      lines: named([["reward/mean", "mean", { spread: "reward/group_std", colour: 2, dash: 0 }], ["eval/reward_mean", "held-out file", { isDotted: true, colour: 3, dash: 1 }],
        ["reward/sampled_mean", "with replaced groups", { faint: true }]]),
      family: FAMILY,
    },
    {
      id: "klseq", title: "KL per completion", unit: "nats/completion", canLog: true, hasBand: isSteered && perSequence,
      lines: [...estimators.map((name) => [`kl_per_sequence/ref/${name}/mean`, name, { faint: name !== own }]), ...(isSteered && perSequence ? [SMOOTHED] : [])],
    },
    {
      id: "klspread", title: `KL over completions, ${own}`, unit: "nats/token", canLog: true,
      lines: named([[`kl/ref/${own}/p50`, "median"], [`kl/ref/${own}/p95`, "95th percentile"], [`kl/ref/${own}/max`, "largest"], [`kl/ref/${own}/token_max`, "largest token", { faint: true }]]),
    },
    {
      id: "klother", title: "KL to old policy and sampler, k3", unit: "nats/token", canLog: true,
      lines: named([["kl/old/k3/mean", "old policy"], ["kl/sampler/k3/mean", "sampler"]]),
    },
    { id: "loss", title: "Losses", unit: "", lines: named([["loss/total", "total"], ["loss/policy", "policy"], ["loss/kl", "β × KL"]]) },
    { id: "grad", title: "Gradient norm", unit: "", canLog: true, lines: named([["grad_norm/total", "total"], ["grad_norm/policy", "policy"], ["grad_norm/kl", "KL"]]) },
    { id: "angle", title: "Policy and KL gradient", unit: "cosine", description: "Below 0 the KL term pulls against the reward.", lines: named([["grad_cosine/policy_kl", "cosine", { isDotted: true, colour: 0, dash: 0 }]]) },
    { id: "spread", title: "Reward spread", unit: "", withZero: true, lines: named([["reward/group_std", "within groups"], ["reward/std", "over all"]]) },
    { id: "entropy", title: "Entropy", unit: "nats/token", withZero: true, lines: named([["policy/entropy", "policy", { colour: 3, dash: 0 }]]) },
    {
      id: "length", title: "Completion length", unit: "tokens", withZero: true,
      lines: named([["completion/length_mean", "mean"], ["completion/length_p95", "95th percentile"]]),
    },
    {
      id: "shares", title: "Shares", unit: "of 1", withZero: true,
      lines: named([["completion/truncated_frac", "cut off"], ["groups/zero_std_frac", "groups of equal reward"], ["completion/rep_ngram4", "repeated 4-grams"], ["completion/distinct2", "distinct 2-grams"],
        ["grader/failed_frac", "not graded"], ["kl/clip_frac", "KL clipped"]]),
    },
    {
      id: "clip", title: "Ratio clipping", unit: "of tokens", withZero: true,
      lines: named([["policy/clip_frac_low", "below"], ["policy/clip_frac_high", "above"]]),
    },
    { id: "ratio", title: "Probability ratio to the old policy", unit: "mean", lines: named([["policy/ratio_mean", "ratio", { colour: 0, dash: 0 }]]) },
    { id: "resampled", title: "Groups drawn anew", unit: "", withZero: true, lines: named([["groups/resampled", "groups"], ["groups/resample_rounds", "draws"]]) },
    { id: "time", title: "Step time by phase", unit: "s", withZero: true, lines: named([["time/step_s", "whole step"], ...Object.entries(TIMES).map(([key, label]) => [`time/${key}_s`, label])]) },
    { id: "speed", title: "Throughput", unit: "tokens/s", withZero: true, lines: named([["throughput/tokens_per_s", "tokens", { colour: 5, dash: 0 }]]) },
    { id: "rate", title: "Learning rate", unit: "", withZero: true, lines: named([["optimizer/learning_rate", "learning rate", { isStepped: true, colour: 4, dash: 0 }]]) },
  ];
}

function describeKl(job) {
  const { kl, beta } = job.resolved;
  const direction = { policy_ref: "KL(policy ‖ reference)", ref_policy: "KL(reference ‖ policy)", jeffreys: "both directions summed" }[kl.direction];
  const band = bandOf(beta) && beta.unit !== "sequence" ? " Shaded: the target band." : "";
  return `${direction}, in the ${kl.placement}.${band}`;
}

/** Names to fetch first: what the top row shows. */
export function firstNames(job) {
  const names = ESTIMATORS.map((name) => `kl/ref/${name}/mean`);
  return new Set([...names, klName(job), "beta/applied", "beta/action", "beta/target", "beta/ema", "reward/mean", "reward/group_std", "time/step_s", "throughput/tokens_per_s"]);
}

/** Whether a metric is drawn somewhere. */
export function wanted(definitions) {
  const names = new Set(["beta/action", "beta/target", "reward/group_std", ...definitions.flatMap((chart) => chart.lines.map(([name]) => name))]);
  return (name) => names.has(name) || name.startsWith(FAMILY);
}

/** All charts of one job: KL, beta and reward in `element`, the others in `more`. */
export class JobCharts {
  constructor(job, feed) {
    this.feed = feed;
    this.alarms = [];
    this.job = job;
    this.element = h("div", { class: "charts" });
    this.more = h("div", { class: "charts" });
    this.group = new ChartGroup({ onZoom: (range) => { this.onZoom(range); feed.zoom(range); }, onPoint: (step) => this.onPoint(step) });
    this.onZoom = this.onPoint = () => {};
    this.charts = [];
  }

  build(definitions) {
    this.charts = definitions.map((definition) => ({ definition, chart: new Chart(this.group, definition) }));
    const elements = this.charts.map(({ chart }) => chart.element);
    append(this.element, elements.slice(0, MAIN));
    append(this.more, elements.slice(MAIN));
    this.update();
  }

  /** While the past is being read, an empty chart says so. */
  setLoading(isLoading) {
    for (const { chart } of this.charts) chart.setEmpty(isLoading ? "Reading the curve …" : "No values yet.");
  }

  dispose() { for (const { chart } of this.charts) chart.dispose(); }

  setAlarms(alarms) {
    this.alarms = alarms;
    this.update();
  }

  /** Draw what the feed has now. */
  update() {
    const { group, feed } = this;
    const look = (name) => feed.lookup(name, group.range);
    const main = feed.series.get(klName(this.job)) ?? feed.series.get("reward/mean");
    const last = Math.max(main?.lastStep ?? 0, 2);
    for (const { definition, chart } of this.charts) {
      const lines = definition.lines.map(([name, label, options]) => this.#line(look(name), name, label, options, look)).filter(Boolean);
      for (const name of definition.family ? [...feed.series.keys()].filter((name) => name.startsWith(definition.family)).sort() : []) {
        lines.push({ label: name.slice(definition.family.length), series: look(name), title: name, faint: true });
      }
      const isAbsent = lines.length === 0 && !["kl", "beta", "reward"].includes(definition.id);
      chart.element.hidden = isAbsent;
      chart.setData({ lines, band: this.#band(definition, last), marks: this.#marks(definition) });
    }
    if (group.extent[1] !== last) group.setExtent(1, last);
  }

  #line(series, name, label, options, look) {
    if (!series) return null;
    const spread = options.spread ? look(options.spread) : undefined;
    return { label, series, title: name, ...options, spread };
  }

  #band(definition, until) {
    const targets = this.feed.series.get("beta/target");
    const band = definition.hasBand && targets ? targetBand(this.job.resolved.beta, targets) : null;
    return band ? { ...band, until } : undefined;
  }

  #marks(definition) {
    const marks = definition.hasAlarms ? [...this.alarms] : [];
    const actions = definition.hasActions ? this.feed.lookup("beta/action", this.group.range) : null;
    if (actions) {
      const [low, high] = this.group.window;
      const moved = [];
      actions.steps.forEach((step, index) => {
        if (actions.values[index] && step >= low && step <= high) moved.push({ step, kind: actions.values[index] > 0 ? "up" : "down" });
      });
      if (moved.length <= MANY_ACTIONS) marks.push(...moved);
    }
    return marks;
  }
}
