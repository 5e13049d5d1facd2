// What a run takes and took, what it did not do of what was asked for, and why it failed: in a box on its node.
import { made } from "./elements.js";
import { say, translated } from "./words.js";

const NAME = "specar_result";
const KEPT = "specar.results"; // in the browser's storage: by workflow and node, for pages that are loaded again
const MOST = 50; // workflows in it
const NOTICES = 2; // that are shown; pointing at them shows all
const MARGIN = 4;
const PADDING = 4; // see specar.css

const find = (node) => node?.widgets?.find((widget) => widget.name === NAME);

/** Puts an empty box on a node. Those of this pack have it from the start: front end 1.32.9 shows no later one of a node
 * that ran. */
export function addResult(node) {
  const element = made("div", "specar-result", null, { hidden: "" }), box = made("div", "", element);
  made("div", "specar-error", box);
  const run = made("details", "", box);
  made("summary", "", run);
  made("div", "", run);
  run.addEventListener("toggle", () => node.setDirtyCanvas?.(true, true));
  made("div", "specar-notices", box);
  const laidOut = () => 2 * box.offsetWidth > node.size[0]; // before the first drawing it may be as narrow as a word
  const height = () => (box.textContent && laidOut() ? box.offsetHeight + 2 * (MARGIN + PADDING) : 0);
  const widget = node.addDOMWidget(NAME, NAME, element, {
    serialize: false, hideOnZoom: false, hideInPanel: true, margin: MARGIN, getMinHeight: height, getMaxHeight: height,
  });
  widget.serialize = false;
  widget.box = box;
  return widget;
}

/** Shows a run (nodes/comfy_runtime/progress.py), with its notices once it is over. Other nodes than samplers have no place
 * for it. */
export function showResult(node, run) {
  const box = find(node)?.box;
  if (!box) return;
  const [summary, rest] = box.querySelector("details").children;
  summary.textContent = inShort(run);
  rest.textContent = run.used ? atLength(run) : "";
  if (run.notices) showNotices(node, run.notices.map(translated));
  else changed(node);
}

/** Shows what is not done of what was asked for; none: takes the last away. */
export function showNotices(node, notices) {
  fill(node, "specar-notices", notices.slice(0, NOTICES).join("\n"), notices.length > NOTICES ? notices.join("\n") : "");
}

/** Shows why a node failed; "": takes it away. */
export const showError = (node, text) => fill(node, "specar-error", text);

function fill(node, part, text, title = "") {
  const widget = find(node) ?? (text && addResult(node));
  if (!widget) return;
  Object.assign(widget.box.querySelector(`.${part}`), { textContent: text, title });
  changed(node);
}

function changed(node) {
  const { element, box } = find(node), wasHidden = element.hidden;
  element.hidden = !box.textContent;
  if (wasHidden && !element.hidden) element.without = node.size[1];
  if (!wasHidden && element.hidden) node.setSize([node.size[0], Math.min(node.size[1], element.without)]);
  node.setDirtyCanvas?.(true, true);
}

const unbroken = (text) => text.replace(" ", "\u00a0");

function inShort({ passes, done, total, plain, left, seconds, used, interrupted, images }) {
  if (!total) return ""; // its notice says why
  if (!passes) return say("Reading the kept part of the image");
  const fewer = (plain / passes).toFixed(1), time = seconds && unbroken(translated(seconds));
  if (used) return [fewer > 1 ? say("{number}x fewer passes", { number: fewer }) : count(passes), time].join(", ");
  return [
    images > 1 && say("{number} images", { number: images }),
    count(passes),
    say("{done} of {total} tokens", { done, total }),
    interrupted ? say("interrupted") : left && say("~{left} left", { left: unbroken(left) }),
  ].filter(Boolean).join(", ");
}

const count = (passes) => say(passes === 1 ? "{passes} pass" : "{passes} passes", { passes });

function atLength({ images, passes, plain, size, used }) {
  return [
    images > 1 && say("{number} images", { number: images }),
    plain > passes && say("{passes} passes instead of {plain}", { passes, plain }),
    say("{width} x {height} pixels", { width: size[0], height: size[1] }),
    translated(used),
  ].filter(Boolean).join("; ");
}

const readKept = () => JSON.parse(localStorage.getItem(KEPT) ?? "{}");

/** The results of a workflow, by node, if they are those of its ``widgets`` (a text). */
export function keptResults(workflow, widgets) {
  const kept = readKept()[workflow];
  return kept?.widgets === widgets ? kept.runs : {};
}

export function keepResult(workflow, widgets, node, run) {
  const { [workflow]: _, ...others } = readKept(), runs = { ...keptResults(workflow, widgets), [node]: run };
  const newest = [...Object.entries(others).slice(1 - MOST), [workflow, { widgets, runs }]];
  localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(newest)));
}
