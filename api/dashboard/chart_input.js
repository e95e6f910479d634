/* Pointer and keys on a chart: hover or arrows move the cursor, dragging or + zooms, double click or 0 shows everything. */

const DRAG_PIXELS = 6;

/** Listen on a chart's stage; returns a function that stops. */
export function listen(chart) {
  const { stage, group } = chart;
  let start = null;

  const stepAt = (event) => chart.scales?.x.value(event.clientX - stage.getBoundingClientRect().left);
  const snap = (step) => {
    const series = chart.data.lines.find((line) => line.series.length)?.series;
    return series ? series.steps[series.nearest(step)] : step;
  };
  const select = (event) => {
    const box = stage.getBoundingClientRect();
    const [from, to] = [start.x, event.clientX].sort((a, b) => a - b);
    chart.selection.hidden = to - from < DRAG_PIXELS;
    chart.selection.style.left = `${from - box.left}px`;
    chart.selection.style.width = `${to - from}px`;
  };
  const finish = () => { start = null; chart.selection.hidden = true; };

  const on = {
    pointerdown(event) {
      if (event.button !== 0 || !chart.scales) return;
      start = { x: event.clientX, step: stepAt(event) };
      stage.setPointerCapture(event.pointerId);
      group.point(snap(start.step));
    },
    pointermove(event) {
      if (!chart.scales) return;
      if (start) select(event);
      else group.point(snap(stepAt(event)));
    },
    pointerup(event) {
      if (start && Math.abs(event.clientX - start.x) >= DRAG_PIXELS) group.zoom([start.step, stepAt(event)]);
      finish();
    },
    pointercancel: finish,
    pointerleave(event) { if (event.pointerType === "mouse" && !start) group.point(null); },
    blur() { group.point(null); },
    dblclick() { group.zoom(null); },
    keydown(event) { if (handleKey(chart, event, snap)) event.preventDefault(); },
  };
  for (const [type, listener] of Object.entries(on)) stage.addEventListener(type, listener);
  return () => { for (const [type, listener] of Object.entries(on)) stage.removeEventListener(type, listener); };
}

/** Whether the key meant something. */
function handleKey(chart, event, snap) {
  const { group } = chart;
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  const [low, high] = group.window;
  const span = high - low;
  const here = group.cursor ?? high;
  const stride = event.shiftKey ? Math.max(1, Math.round(span / 10)) : 1;
  const move = (by) => { group.point(moved(chart, here, by) ?? snap(here + by)); return true; };
  switch (event.key) {
    case "ArrowLeft": case "ArrowDown": return move(-stride);
    case "ArrowRight": case "ArrowUp": return move(stride);
    case "PageDown": return move(-Math.max(1, Math.round(span / 10)));
    case "PageUp": return move(Math.max(1, Math.round(span / 10)));
    case "Home": group.point(snap(low)); return true;
    case "End": group.point(snap(high)); return true;
    case "+": case "=": group.zoom([here - span / 4, here + span / 4]); return true;
    case "-": group.zoom([here - span, here + span]); return true;
    case "0": group.zoom(null); return true;
    case "Escape": group.point(null); return true;
    default: return false;
  }
}

/** One point further, when a single step would snap back to the same point of a thinned series. */
function moved(chart, here, by) {
  const series = chart.data.lines.find((line) => line.series.length)?.series;
  if (!series || Math.abs(by) !== 1) return null;
  const index = series.nearest(here) + Math.sign(by);
  return series.steps[Math.min(series.length - 1, Math.max(0, index))];
}
