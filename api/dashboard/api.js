/* The public API and nothing else. The key, if any, lives in this tab's session storage and goes only into the header. */

const KEY = "grpo-api-key";
const BASE = "/v1/fine_tuning/jobs";

/** An answer that is no success, as a sentence for the reader. `kind`: offline, key, scope, missing, conflict, refused, server. */
export class ApiError extends Error {
  constructor(kind, message, { status = 0, code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { kind, status, code, param });
  }
}

export const session = {
  get key() { return sessionStorage.getItem(KEY) ?? ""; },
  set key(value) { if (value) sessionStorage.setItem(KEY, value); else sessionStorage.removeItem(KEY); },
};

const KINDS = { 401: "key", 403: "scope", 404: "missing", 409: "conflict", 412: "conflict" };
const watchers = new Set();

/** Be told `true` or `false` whenever a request learns whether the server answers. */
export function watchReachable(listener) { watchers.add(listener); }
function reachable(yes) { for (const listener of watchers) listener(yes); }

/** Headers that carry the key. */
export function authorised(headers = {}) {
  return session.key ? { ...headers, authorization: `Bearer ${session.key}` } : headers;
}

/** A request; throws ApiError, or AbortError when `signal` says so. Returns the Response. */
export async function request(path, { method = "GET", body, headers = {}, signal, cache = "no-store" } = {}) {
  let answer;
  const json = body === undefined || body instanceof FormData ? {} : { "content-type": "application/json" };
  const payload = body === undefined || body instanceof FormData ? body : JSON.stringify(body);
  try {
    answer = await fetch(path, { method, body: payload, signal, cache, headers: authorised({ ...json, ...headers }) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    reachable(false);
    throw new ApiError("offline", "The server does not answer. Start it again (grpo up); this page goes on by itself once it does.");
  }
  reachable(true);
  if (answer.ok) return answer;
  throw await errorOf(answer);
}

async function errorOf(answer) {
  const given = await answer.json().then((body) => body?.error, () => null);
  const kind = KINDS[answer.status] ?? (answer.status >= 500 ? "server" : "refused");
  let text = given?.message ?? `The server answered ${answer.status} without an explanation.`;
  if (kind === "key") {
    text = session.key
      ? "The server does not accept this API key. It may be mistyped, expired or revoked; enter another one."
      : "This server asks for an API key. Enter one made with “grpo keys create”.";
  }
  if (kind === "server") text += ` Look in the server's log for request ${answer.headers.get("x-request-id") ?? "(no id)"}.`;
  return new ApiError(kind, text, { status: answer.status, code: given?.code ?? null, param: given?.param ?? null });
}

/** The decoded JSON of a request. */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/** A query string; empty values are left out. */
export function query(values) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

const at = (id, rest = "") => `${BASE}/${encodeURIComponent(id)}${rest}`;

/** An idempotency key that stays the same while the body does, so that a lost answer does not make two jobs. */
export function onceKey() {
  let [known, key] = ["", ""];
  return (body) => {
    const text = JSON.stringify(body);
    if (text !== known) [known, key] = [text, randomKey()];
    return key;
  };
}

/** 128 random bits; `crypto.randomUUID` is missing on pages that come over plain HTTP from another machine. */
const randomKey = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const jobs = {
  list: (values, signal) => json(`${BASE}${query(values)}`, { signal }),
  get: (id, signal) => json(at(id), { signal }),
  create: (spec, key) => json(BASE, { method: "POST", body: spec, headers: { "idempotency-key": key } }),
  validate: (spec, signal) => json(`${BASE}/validate`, { method: "POST", body: spec, signal }),
  probe: (spec, signal) => json(`${BASE}/validate?probe=true`, { method: "POST", body: spec, signal }),
  fork: (id, body, key) => json(at(id, "/fork"), { method: "POST", body, headers: { "idempotency-key": key } }),
  act: (id, verb) => json(at(id, `/${verb}`), { method: "POST" }),
  metrics: (id, values, signal) => json(at(id, `/metrics${query(values)}`), { signal }),
  events: (id, values, signal) => json(at(id, `/events${query(values)}`), { signal }),
  rollouts: (id, values, signal) => json(at(id, `/rollouts${query(values)}`), { signal }),
  checkpoints: (id, values, signal) => json(at(id, `/checkpoints${query(values)}`), { signal }),
  path: at,
};

const send = (method, path, body) => json(path, { method, body });
const one = (job, id, rest = "") => at(job, `/checkpoints/${encodeURIComponent(id)}${rest}`);

export const checkpoints = {
  pin: (job, id) => send("POST", one(job, id, "/pin")),
  unpin: (job, id) => send("DELETE", one(job, id, "/pin")),
  promote: (job, id, body) => send("POST", one(job, id, "/promote"), body),
  withdraw: (job, id) => send("DELETE", one(job, id, "/promote")),
  remove: (job, id) => send("DELETE", one(job, id)),
};

export const sweeps = {
  list: (values, signal) => json(`/v1/fine_tuning/sweeps${query(values)}`, { signal }),
  get: (id, signal) => json(`/v1/fine_tuning/sweeps/${encodeURIComponent(id)}`, { signal }),
  create: (body, key) => json("/v1/fine_tuning/sweeps", { method: "POST", body, headers: { "idempotency-key": key } }),
  act: (id, verb) => json(`/v1/fine_tuning/sweeps/${encodeURIComponent(id)}/${verb}`, { method: "POST" }),
};

export const control = {
  /** The settings and the ETag a change must name. */
  async get(id, signal) {
    const answer = await request(at(id, "/control"), { signal });
    return { settings: await answer.json(), etag: answer.headers.get("etag") };
  },
  change: (id, values, etag) => json(at(id, "/control"), { method: "PATCH", body: values, headers: etag ? { "if-match": etag } : {} }),
};
