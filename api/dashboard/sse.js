/* Server-sent events read with fetch, because EventSource cannot send a key. Resumes by Last-Event-ID after every break. */

import { ApiError, request } from "./api.js";

const LONGEST_WAIT_MS = 15000;

/** Cuts a byte stream into events `{id, event, data}`; comments are dropped. Feed it text, take what is complete. */
export class EventParser {
  constructor() {
    this.rest = "";
    this.fields = { id: undefined, event: "message", data: [] };
  }

  /** The events completed by this piece of text. */
  feed(text) {
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    return lines.map((line) => this.#line(line)).filter(Boolean);
  }

  #line(line) {
    if (line === "") return this.#dispatch();
    if (line.startsWith(":")) return null;
    const cut = line.indexOf(":");
    const name = cut < 0 ? line : line.slice(0, cut);
    const value = cut < 0 ? "" : line.slice(cut + 1).replace(/^ /, "");
    if (name === "data") this.fields.data.push(value);
    else if (name === "event") this.fields.event = value;
    else if (name === "id" && !value.includes("\0")) this.fields.id = value;
    return null;
  }

  #dispatch() {
    const { id, event, data } = this.fields;
    this.fields = { id, event: "message", data: [] };
    return data.length ? { id, event, data: data.join("\n") } : null;
  }
}

/**
 * Follow a stream until it says [DONE], answers 204, or `signal` aborts.
 * `onEvent(event)` gets each event with decoded `data`; `onState("live" | "waiting" | "done", error?)` says how it goes.
 * A refusal (wrong key, no such job) ends it with `onState("refused", error)`.
 */
export async function follow(path, { lastId, signal, onEvent, onState }) {
  let attempt = 0;
  let id = lastId;
  while (!signal.aborted) {
    try {
      const headers = { accept: "text/event-stream", ...(id ? { "last-event-id": id } : {}) };
      const answer = await request(path, { headers, signal });
      if (answer.status === 204) return onState("done");
      onState("live");
      attempt = 0;
      const ended = await read(answer.body, signal, (event) => {
        id = event.id ?? id;
        onEvent({ ...event, data: JSON.parse(event.data) });
      });
      if (ended) return onState("done");
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) return undefined;
      if (error instanceof ApiError && ["key", "scope", "missing", "refused"].includes(error.kind)) return onState("refused", error);
      if (error instanceof SyntaxError) throw error;
      onState("waiting", error);
    }
    attempt += 1;
    await pause(Math.min(LONGEST_WAIT_MS, 500 * 2 ** attempt), signal);
  }
  return undefined;
}

/** Reads a body; true when the stream said it is complete, false when it broke off. */
async function read(body, signal, onEvent) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return false;
      for (const event of parser.feed(decoder.decode(value, { stream: true }))) {
        if (event.data === "[DONE]") return true;
        if (!signal.aborted) onEvent(event);
      }
    }
  } finally {
    reader.releaseLock();
  }
}

/** Wait, or until aborted. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
