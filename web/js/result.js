// What a run took, in two lines on its sampler. They stay, unlike ComfyUI's own text of a running node.
const NAME = "specar_result";
const RUNNING = "$$node-text-preview"; // ComfyUI's own text, which some front ends leave on the node
const HEIGHT = 48; // of two lines, with their margins

const find = (node, name) => node?.widgets?.find((widget) => widget.name === name);

/** Puts an empty text on a sampler. It is there from the start: front end 1.32.9 shows no later one of a node that ran. */
export function addResult(node) {
  const element = document.createElement("div");
  element.className = "specar-result";
  const height = () => (element.textContent ? HEIGHT : 0);
  const widget = node.addDOMWidget(NAME, NAME, element, {
    serialize: false, hideOnZoom: false, hideInPanel: true, margin: 4, getMinHeight: height, getMaxHeight: height,
  });
  widget.serialize = false;
}

/** Shows a text in place of ComfyUI's; "": none. Other nodes than samplers have no place for it. */
export function showResult(node, text) {
  const widget = find(node, NAME);
  if (!widget) return;
  widget.element.textContent = text;
  const running = text && find(node, RUNNING);
  if (running) node.removeWidget(running);
  node.setDirtyCanvas?.(true, true);
}
