/* What metrics are called and how a job's target is to be read. */

import { firstAfter } from "./series.js";

export const ESTIMATORS = ["k1", "k2", "k3", "abs", "exact"];

/** Where a job's own KL is found. */
export function klName(job) {
  return `kl/ref/${job.resolved.kl.estimator}/mean`;
}

/** What a job is called: its suffix, else its id. */
export function title(job) {
  return job.user_provided_suffix ?? job.id;
}

export const STATUS_WORDS = {
  validating_files: "checking files", queued: "queued", running: "running", paused: "paused", succeeded: "succeeded", failed: "failed", cancelled: "cancelled",
};

/** The band an adaptive rule steers into, as factors of its target; null for rules without one. */
export function bandOf(beta) {
  if (beta.rule === "deadband") return [beta.low_ratio, beta.high_ratio];
  if (beta.rule === "ppo") return [1 / beta.band, beta.band];
  if (beta.rule === "ziegler") return [1 - beta.clip, 1 + beta.clip];
  return null;
}

/** The target over steps with its band, for a chart; null when the rule has no target. */
export function targetBand(beta, targets) {
  const factors = bandOf(beta);
  if (!factors) return null;
  const around = (target) => ({ target, low: target * factors[0], high: target * factors[1] });
  return {
    targets, around,
    at(step) {
      const index = firstAfter(targets.steps, step) - 1;
      return index < 0 ? null : around(targets.values[index]);
    },
  };
}

/** A sentence about the rule that sets beta. */
export function ruleSentence(beta) {
  if (beta.rule === "fixed") return "β is fixed until somebody changes it.";
  if (beta.rule === "schedule") return `β follows a ${beta.schedule.type} schedule, whatever KL does.`;
  const unit = beta.unit === "token" ? "nats per token" : "nats per completion";
  const from = beta.calibration ? "a target measured in the warm-up" : `a target of ${beta.target} ${unit}`;
  const often = beta.update_every === 1 ? "every rollout" : `every ${beta.update_every} rollouts`;
  return `The ${beta.rule} rule steers towards ${from}, deciding ${often}.`;
}
