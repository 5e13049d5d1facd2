// What a run takes and took, and what it did not do of what was asked for, on its sampler.
import { made } from "./elements.js";
import { say, translated } from "./words.js";

const NAME = "specar_result";
const KEPT = "specar.results"; // in the browser's storage: by workflow and node, for pages that are loaded again
const MOST = 50; // workflows in it
const MARGIN = 4;
const PADDING = 4; // see specar.css

const find = (node) => node?.widgets?.find((widget) => widget.name === NAME);

/** Puts an empty text on a sampler. It is there from the start: front end 1.32.9 shows no later one of a node that ran. */
export function addResult(node) {
  const element = made("div", "specar-result", null, { hidden: "" }), text = made("div", "", element);
  made("div", "", text);
  made("div", "specar-notices", text);
  const height = () => (text.textContent ? text.offsetHeight + 2 * (MARGIN + PADDING) : 0);
  const widget = node.addDOMWidget(NAME, NAME, element, {
    serialize: false, hideOnZoom: false, hideInPanel: true, margin: MARGIN, getMinHeight: height, getMaxHeight: height,
  });
  widget.serialize = false;
}

/** Shows a run (nodes/comfy_runtime/progress.py), with its notices once it is over. Other nodes than samplers have no place
 * for it. */
export function showResult(node, run) {
  write(node, 0, inWords(run));
  if (run.notices) noticed(node, run.notices.map(translated).join("\n"));
}

/** Shows notices; none: takes them away. Returns false for other nodes than samplers. */
export const noticed = (node, notices) => write(node, 1, notices);

function write(node, place, words) {
  const widget = find(node);
  if (!widget) return false;
  const text = widget.element.firstChild;
  text.children[place].textContent = words;
  widget.element.hidden = !text.textContent;
  node.setDirtyCanvas?.(true, true);
  return true;
}

const unbroken = (text) => text.replace(" ", "\u00a0");

function inWords({ images, passes, done, total, plain, left, seconds, size, used, interrupted }) {
  if (!total) return ""; // its notice says why
  if (!passes) return say("Reading the kept part of the image");
  const count = passes === 1 ? "{passes} pass" : plain > passes ? "{passes} passes instead of {plain}" : "{passes} passes";
  const line = [
    images > 1 && say("{number} images", { number: images }),
    say(count, { passes, plain }),
    say("{done} of {total} tokens", { done, total }),
    interrupted ? say("interrupted") : left && say("~{left} left", { left: unbroken(left) }),
    seconds && unbroken(translated(seconds)),
  ].filter(Boolean).join(", ");
  return used ? `${line}\n${say("{width} x {height} pixels", { width: size[0], height: size[1] })}; ${translated(used)}` : line;
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
