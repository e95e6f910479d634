/* What differs between two texts, by words: pure functions. */

const MOST_CELLS = 4_000_000;

/** Words and single other characters, each with the white space before it. */
export function cut(text) {
  return text.match(/\s*(?:[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_])|\s+$/gu) ?? [];
}

/**
 * From `before` to `after` as [{kind: "same" | "gone" | "new", text}], neighbours of one kind joined. The longest common
 * subsequence of words stays; within a change what is gone comes first. Middles too long to compare are one change.
 */
export function diff(before, after) {
  const [a, b] = [cut(before), cut(after)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const middle = between(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const parts = [["same", a.slice(0, start)], ...middle, ["same", end ? a.slice(-end) : []]];
  return joined(parts.filter(([, words]) => words.length));
}

function between(a, b) {
  if (!a.length || !b.length || a.length * b.length > MOST_CELLS) return [["gone", a], ["new", b]];
  const lengths = common(a, b);
  const width = b.length + 1;
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) { parts.push(["same", [a[i]]]); i += 1; j += 1; }
    else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) { parts.push(["gone", [a[i]]]); i += 1; }
    else { parts.push(["new", [b[j]]]); j += 1; }
  }
  return [...parts, ["gone", a.slice(i)], ["new", b.slice(j)]];
}

/** Lengths of the longest common subsequences of all pairs of ends. */
function common(a, b) {
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] = a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  return lengths;
}

function joined(parts) {
  const found = [];
  let change = { gone: "", new: "" };
  const close = () => {
    for (const kind of ["gone", "new"]) if (change[kind]) found.push({ kind, text: change[kind] });
    change = { gone: "", new: "" };
  };
  for (const [kind, words] of parts) {
    const text = words.join("");
    if (kind !== "same") change[kind] += text;
    else if (text && !change.gone && !change.new && found.at(-1)?.kind === "same") found.at(-1).text += text;
    else if (text) { close(); found.push({ kind, text }); }
  }
  close();
  return found;
}
