// What SpecAR's output nodes show: the text of the report ("text" in their UI output) in a read-only field, and, on
// Acceptance Map, the map itself with the numbers of every token. Without this file ComfyUI shows the map's picture.
// On samplers, what a run took. On any node, what was asked for but not done (words that the model does not know, areas
// of a prompt, ...).
import { app } from "/scripts/app.js";
import { MapView } from "./map.js";
import { showReport, widgetOf } from "./report.js";
import { addResult, showResult } from "./result.js";

const SAMPLED = "LATENT,AR_TRACE"; // what samplers give; their category is translated
const MAP_NODE = "SpecARAcceptanceMap";
const MAP = "specar_map";
const MAP_WIDTH = 400; // at least, when it first appears
const MAP_HEIGHT = 490;
const NOTICE_SECONDS = 15;
const PICTURE = "$$canvas-image-preview"; // ComfyUI's own, for results that an earlier graph left under the node's id

document.head.append(Object.assign(document.createElement("link"), {
  rel: "stylesheet", href: new URL("./specar.css", import.meta.url).href,
}));

const view = (file) => `/view?${new URLSearchParams(file)}`;

function mapWidget(node) {
  const picture = node.widgets.find((widget) => widget.name === PICTURE);
  if (picture) node.widgets.splice(node.widgets.indexOf(picture), 1);
  const map = new MapView({
    fetchFile: (file) => app.api.fetchApi(view(file)),
    addressOf: (file) => app.api.apiURL(view(file)),
  });
  const widget = node.addDOMWidget(MAP, "specar_map", map.element, {
    serialize: false, hideOnZoom: false, hideInPanel: true, getMinHeight: () => MAP_HEIGHT,
  });
  widget.serialize = false;
  widget.map = map;
  leaveToCanvas(map.element);
  const [width, height] = node.size;
  const [leastWidth, leastHeight] = node.computeSize();
  node.setSize([Math.max(width, leastWidth, MAP_WIDTH), Math.max(height, leastHeight)]);
  return widget;
}

/** On the canvas, zooming and panning also work above the map (the new renderer sees to it itself). */
function leaveToCanvas(element) {
  const pass = (handle) => (event) => !window.LiteGraph.vueNodesMode && handle(event);
  element.addEventListener("wheel", pass((event) => app.canvas.processMouseWheel(event)));
  element.addEventListener("pointerdown", pass((event) => event.button === 1 && app.canvas.processMouseDown(event)));
  element.addEventListener("pointermove", pass((event) => event.buttons & 4 && app.canvas.processMouseMove(event)));
  element.addEventListener("pointerup", pass((event) => event.button === 1 && app.canvas.processMouseUp(event)));
}

function show(node, output) {
  if (!output?.text) return;
  const report = output.text.join("\n");
  if (node.type === MAP_NODE) {
    const { map } = widgetOf(node, MAP, mapWidget);
    map.show({ pictures: output.images ?? [], numbers: output.specar_tokens ?? [], report });
    Object.assign(node, { images: output.images, imgs: [map.image], imageIndex: null, overIndex: 0 }); // for its menu
    node.setDirtyCanvas?.(true, true);
  } else {
    showReport(node, report);
  }
}

/** The node that outputs belong to: "12", or "<id of a subgraph>:12". */
function nodeAt(locator) {
  const [id, subgraph] = locator.split(":").reverse();
  const root = app.rootGraph ?? app.graph;
  return (subgraph ? root.subgraphs?.get(subgraph) : root)?.getNodeById(id);
}

/** The node that is executing: "12", or the ids of subgraph nodes before it ("7:12"). */
function executingNode(id) {
  const inside = String(id).split(":"), last = inside.pop();
  const graph = inside.reduce((outer, each) => outer?.getNodeById(each)?.subgraph, app.rootGraph ?? app.graph);
  return graph?.getNodeById(last);
}

const told = new Set(); // notices of this run that were toasts: a sampler repeats those of its prompts

/** What a run does not do of what was asked for, on the node that says so (see nodes/comfy_runtime/messages.py), and as
 * toasts where that node is not visible: inside a subgraph, or in app mode. */
function showNotices({ detail: { node, notices } }) {
  const speaker = executingNode(node);
  if (speaker) showReport(speaker, notices.join("\n"));
  if (speaker?.graph === app.canvas.graph && app.canvas.canvas.getClientRects().length) return;
  for (const summary of notices.filter((notice) => !told.has(notice))) {
    told.add(summary);
    app.extensionManager.toast.add({ severity: "warn", summary, life: NOTICE_SECONDS * 1000 });
  }
}

const results = {}; // what runs took, by workflow and node: a tab that is opened again makes its nodes anew

function resultsHere() {
  return (results[app.extensionManager.workflow.activeWorkflow?.path] ??= {});
}

/** What a run took, on its sampler, until the next run of it tells of itself (see nodes/comfy_runtime/messages.py). */
function listenToResults(api) {
  const tell = (node, text) => {
    resultsHere()[node] = text;
    showResult(executingNode(node), text);
  };
  api.addEventListener("specar.result", ({ detail: { node, text } }) => tell(node, text));
  api.addEventListener("progress_text", ({ detail: { nodeId } }) => tell(nodeId, ""));
}

app.registerExtension({
  name: "specar.report",
  setup() {
    app.api.addEventListener("specar.notices", showNotices);
    app.api.addEventListener("execution_start", () => told.clear());
    listenToResults(app.api);
  },
  nodeCreated(node) {
    if (node.comfyClass?.startsWith("SpecAR")) {
      // Removed widgets, which keep their place in saved workflows: on the canvas the option alone does not hide them.
      for (const widget of node.widgets?.filter((each) => each.options?.hidden) ?? []) {
        Object.assign(widget, { hidden: true, computeSize: () => [0, -4] }); // 4 pixels are between widgets
      }
    }
    if (String(node.constructor.nodeData?.output) === SAMPLED) addResult(node);
  },
  async beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith("SpecAR") || !nodeData.output_node) return;
    const { onExecuted, onDrawBackground, onNodeCreated } = nodeType.prototype;
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      show(this, output);
    };
    if (nodeData.name !== MAP_NODE) return;
    // The map stands for the picture that ComfyUI would draw: on the canvas, and with the new renderer.
    nodeType.prototype.onDrawBackground = function () {
      if (!this.widgets?.some((widget) => widget.name === MAP)) onDrawBackground?.apply(this, arguments);
    };
    nodeType.prototype.onNodeCreated = function () {
      onNodeCreated?.apply(this, arguments);
      this.hideOutputImages = true;
    };
  },
  /** Results that come back: another workflow's tab, or a run opened from the queue. */
  onNodeOutputsUpdated(outputs) {
    if (Object.keys(outputs).length) {
      for (const [node, text] of Object.entries(resultsHere())) showResult(executingNode(node), text);
    }
    for (const [locator, output] of Object.entries(outputs)) {
      const node = nodeAt(locator);
      if (node?.type?.startsWith("SpecAR") && node.constructor.nodeData?.output_node) show(node, output);
    }
  },
});
