// What a run took, in two lines on its sampler. They stay, other than ComfyUI's own text of a running node.
import { widgetOf } from "./report.js";

const NAME = "specar_result";
const RUNNING = "$$node-text-preview"; // ComfyUI's own text, which some front ends leave on the node
const HEIGHT = 40;

function resultWidget(node) {
  const element = document.createElement("div");
  element.className = "specar-result";
  const widget = node.addDOMWidget(NAME, "specar_result", element, {
    serialize: false, hideOnZoom: false, getMinHeight: () => HEIGHT, getMaxHeight: () => HEIGHT,
  });
  widget.serialize = false;
  return widget;
}

function remove(node, name) {
  const widget = node?.widgets?.find((each) => each.name === name);
  if (widget) node.removeWidget(widget);
}

/** Shows the text, in place of ComfyUI's. node: undefined if it is gone. */
export function showResult(node, text) {
  if (!node) return;
  remove(node, RUNNING);
  widgetOf(node, NAME, resultWidget).element.textContent = text;
}

/** Takes the text away. */
export function clearResult(node) {
  remove(node, NAME);
}
