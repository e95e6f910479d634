/* What the pages that compose a job or a sweep share: opening, a check by the server after each pause in the writing, and the end. */

import { ApiError } from "./api.js";

const CHECK_AFTER_MS = 450;

/** A subclass has `load(signal)`, `build(found)`, `check(signal)` and `refusal`, the sentence shown when it cannot be opened. */
export class Composer {
  #abort = new AbortController();
  #checking = null;
  #timer = null;

  constructor(root, params, page) {
    Object.assign(this, { root, page, from: params.get("from") });
  }

  dispose() {
    this.#abort.abort();
    this.invalidate();
  }

  async open() {
    try {
      this.build(await this.load(this.#abort.signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.page.failed(error, this.root, this.refusal);
      return;
    }
    this.#check();
  }

  /** What the server said so far is about another document. */
  invalidate() {
    if (this.create) this.create.disabled = true;
    this.#checking?.abort();
    clearTimeout(this.#timer);
  }

  changed() {
    this.invalidate();
    this.#timer = setTimeout(() => this.#check(), CHECK_AFTER_MS);
  }

  /** Ask the server about what is written now; only the newest answer counts. */
  #check() {
    this.#checking?.abort();
    this.#checking = new AbortController();
    this.check(this.#checking.signal);
  }
}
