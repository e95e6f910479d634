/* Saving what the server sends. With a key the browser's own download cannot be used, since a link carries no header. */

import { request, session } from "./api.js";
import { h } from "./dom.js";

/** Save an answer as a file. Large answers are streamed to disk where the browser can. */
export async function save(path, name, onProgress = () => {}) {
  if (!session.key) return click(path, name);
  const answer = await request(path);
  if (window.showSaveFilePicker) return stream(answer, name, onProgress);
  const url = URL.createObjectURL(await answer.blob());
  click(url, name);
  return setTimeout(() => URL.revokeObjectURL(url), 60000);
}

async function stream(answer, name, onProgress) {
  let handle;
  try {
    handle = await window.showSaveFilePicker({ suggestedName: name });
  } catch (error) {
    await answer.body.cancel();
    if (error.name === "AbortError") return;
    throw error;
  }
  const file = await handle.createWritable();
  let done = 0;
  const counter = new TransformStream({
    transform(chunk, controller) {
      done += chunk.byteLength;
      onProgress(done);
      controller.enqueue(chunk);
    },
  });
  await answer.body.pipeThrough(counter).pipeTo(file);
}

/** Save a text made here. */
export function saveText(text, name, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  click(url, name);
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

function click(url, name) {
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}
