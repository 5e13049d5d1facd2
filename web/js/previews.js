// A sampler's live preview goes when the run is over and another node has its image: the page would show each image twice.
// Not inside a subgraph, whose node on the page still reads the preview.
import { app } from "/scripts/app.js";
import { executingNode, isSampler, PICTURE } from "./nodes.js";

const DELAY = 600; // milliseconds; the front end itself takes 400 to let go of a preview

const heights = new Map(); // of samplers before the run
const done = new Set(); // ids of those that ran

function begin() {
  heights.clear();
  done.clear();
  for (const node of app.canvas.graph._nodes.filter(isSampler)) heights.set(node, node.size[1]);
}

function end() {
  for (const id of done) {
    const node = executingNode(id);
    if (!isSampler(node) || !node.outputs[0].links?.length) continue;
    app.extensionManager._p?._s.get("nodeOutput")?.revokePreviewsByExecutionId(id);
    setTimeout(() => drop(node), DELAY);
  }
}

/** On the canvas, the picture is a part of the node. */
function drop(node) {
  const picture = node.widgets.findIndex((widget) => widget.name === PICTURE);
  if (picture < 0) return;
  node.widgets.splice(picture, 1);
  node.imgs = undefined;
  node.setSize([node.size[0], Math.max(node.computeSize()[1], heights.get(node) ?? 0)]);
}

app.registerExtension({
  name: "specar.previews",
  setup() {
    app.api.addEventListener("execution_start", begin);
    app.api.addEventListener("executed", ({ detail: { node } }) => String(node).includes(":") || done.add(node));
    app.api.addEventListener("execution_success", end);
  },
});
