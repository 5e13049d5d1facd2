// What SpecAR's output nodes show: the text of the report ("text" in their UI output) in a read-only field, on Acceptance
// Map the map with the numbers of every token, and on Compare Runs and Find Fastest the chart. Without this file ComfyUI
// shows the pictures of these. On samplers, what a run took. On any node, what was asked for but not done (words that the
// model does not know, areas of a prompt, ...).
import { app } from "/scripts/app.js";
import { ChartView } from "./chart.js";
import { MapView } from "./map.js";
import { executingNode, hasSamples, locatorOf, nodeAt, PICTURE, rootGraph, widgetsOf } from "./nodes.js";
import { showReport, widgetOf } from "./report.js";
import { addResult, keepResult, keptResults, showNotices, showResult } from "./result.js";
import { loadWords, translated } from "./words.js";

const tells = (data) => data?.name.startsWith("SpecAR") && (data.output_node || hasSamples(data));
const MAP = "SpecARAcceptanceMap";
const VIEWS = { [MAP]: MapView, SpecARCompareTraces: ChartView, SpecARFindFastest: ChartView }; // draw nodes' pictures
const VIEW = "specar_view"; // the widget
const VIEW_WIDTH = 400; // at least
const COLOURS = { // of sockets of our types and their links
  AR_MODEL: "#9d8cff", AR_DRAFTER: "#4fc3c7", AR_RULE: "#f08a5d", AR_TRACE: "#8fce5a", AR_METHOD: "#e0bd4c",
};
const NOTICE_SECONDS = 10;

document.head.append(Object.assign(document.createElement("link"), {
  rel: "stylesheet", href: new URL("./specar.css", import.meta.url).href,
}));
// The new renderer takes the colours of sockets from here, the canvas where setup() puts them.
document.head.append(Object.assign(document.createElement("style"), {
  textContent: Object.entries(COLOURS).map(([type, colour]) => `:root { --color-datatype-${type}: ${colour}; }`).join(""),
}));

const view = (file) => `/view?${new URLSearchParams(file)}`;

/** A palette that has no colour for a type of ours would take away the one it has. */
function keepColour(colours, type, colour) {
  Object.defineProperty(colours, type, {
    enumerable: true, get: () => colour, set: (other) => { colour = other || colour; },
  });
}

const server = {
  fetchFile: (file) => app.api.fetchApi(view(file)),
  addressOf: (file) => app.api.apiURL(view(file)),
};

function viewWidget(node) {
  // For results that an earlier graph left under the node's id.
  const picture = node.widgets?.find((widget) => widget.name === PICTURE);
  if (picture) node.widgets.splice(node.widgets.indexOf(picture), 1);
  const shown = new VIEWS[node.type](server);
  const widget = node.addDOMWidget(VIEW, VIEW, shown.element, {
    serialize: false, hideOnZoom: false, hideInPanel: true, getMinHeight: () => shown.height,
  });
  widget.serialize = false;
  widget.view = shown;
  leaveToCanvas(shown.element);
  return widget;
}

function draw(node, content) {
  widgetOf(node, VIEW, viewWidget).view.show(content);
  const [width, height] = node.size, least = node.computeSize();
  node.setSize([Math.max(width, least[0], VIEW_WIDTH), Math.max(height, least[1])]);
}

/** On the canvas, zooming and panning also work above it (the new renderer sees to it itself). */
function leaveToCanvas(element) {
  const pass = (handle) => (event) => !window.LiteGraph.vueNodesMode && handle(event);
  element.addEventListener("wheel", pass((event) => app.canvas.processMouseWheel(event)));
  element.addEventListener("pointerdown", pass((event) => event.button === 1 && app.canvas.processMouseDown(event)));
  element.addEventListener("pointermove", pass((event) => event.buttons & 4 && app.canvas.processMouseMove(event)));
  element.addEventListener("pointerup", pass((event) => event.button === 1 && app.canvas.processMouseUp(event)));
}

function show(node, output) {
  const report = output?.text && translated(output.text.join("\n"));
  if (node.type === MAP && report) {
    draw(node, { pictures: output.images ?? [], numbers: output.specar_tokens ?? [], report });
    const imgs = [widgetOf(node, VIEW).view.image];
    Object.assign(node, { images: output.images, imgs, imageIndex: null, overIndex: 0 }); // for its menu
  } else if (report) showReport(node, report);
  if (output?.specar_run) {
    const run = JSON.parse(output.specar_run[0]);
    showResult(node, run);
    keepResult(rootGraph().id, widgetsOf(rootGraph()), locatorOf(node), run);
  }
  if (output?.specar_chart) draw(node, JSON.parse(output.specar_chart[0]));
  node.setDirtyCanvas?.(true, true);
}

const toasted = new Set(); // notices of this run that were toasts: a sampler repeats those of its prompts
let running = null; // {node, run} that was shown last, of the prompt that runs
let prompt = null; // its id
let restored = false; // has the page shown a graph

function showRun({ detail }) {
  running = detail;
  showResult(executingNode(detail.node), detail.run);
}

function begin({ detail }) {
  toasted.clear();
  [running, prompt] = [null, detail.prompt_id];
}

/** A sampler would seem to go on. Newer front ends may not say which node was interrupted. */
function showInterruption({ detail: { node_id, prompt_id } }) {
  const ours = node_id ? running?.node === node_id : prompt_id === prompt;
  if (running && ours) showResult(executingNode(running.node), { ...running.run, interrupted: true });
}

/** What a run does not do of what was asked for, on the node that says so (see nodes/comfy_runtime/progress.py), and as a
 * toast where that node is not visible: inside a subgraph, or in app mode. */
function notify({ detail: { node, notices: english } }) {
  const notices = english.map(translated), speaker = executingNode(node);
  if (speaker) showNotices(speaker, notices);
  if (speaker?.graph === app.canvas.graph && app.canvas.canvas.getClientRects().length) return;
  const others = notices.filter((notice) => !toasted.has(notice));
  if (!others.length) return;
  others.forEach((notice) => toasted.add(notice));
  app.extensionManager.toast.add({ severity: "warn", summary: others.join(" "), life: NOTICE_SECONDS * 1000 });
}

app.registerExtension({
  name: "specar.report",
  async setup() {
    app.api.addEventListener("specar.notices", notify);
    app.api.addEventListener("execution_start", begin);
    app.api.addEventListener("specar.run", showRun);
    app.api.addEventListener("executed", ({ detail }) => { if (detail.node === running?.node) running = null; });
    app.api.addEventListener("execution_interrupted", showInterruption);
    for (const colours of [app.canvas.default_connection_color_byType, app.canvas.constructor.link_type_colors]) {
      Object.entries(COLOURS).forEach(([type, colour]) => keepColour(colours, type, colour));
    }
    window.LiteGraph.slot_types_default_in.LATENT?.push("SpecAREmptyLatent"); // offered where latent_image is dropped
    await loadWords(app);
  },
  /** What runs took before the page was loaded again. Graphs that are opened later have not run yet, or come with their
   * outputs (see below). */
  afterConfigureGraph() {
    if (restored) return;
    restored = true;
    for (const [locator, run] of Object.entries(keptResults(rootGraph().id, widgetsOf(rootGraph())))) showResult(nodeAt(locator), run);
  },
  nodeCreated(node) {
    if (node.comfyClass?.startsWith("SpecAR")) {
      // Removed widgets, which keep their place in saved workflows: on the canvas the option alone does not hide them.
      for (const widget of node.widgets?.filter((each) => each.options?.hidden) ?? []) {
        Object.assign(widget, { hidden: true, computeSize: () => [0, -4] }); // 4 pixels are between widgets
      }
      addResult(node);
    }
  },
  async beforeRegisterNodeDef(nodeType, nodeData) {
    if (!tells(nodeData)) return;
    const { onExecuted, onDrawBackground, onNodeCreated } = nodeType.prototype;
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      show(this, output);
    };
    if (!(nodeData.name in VIEWS)) return;
    // The view stands for the picture that ComfyUI would draw: on the canvas, and with the new renderer.
    nodeType.prototype.onDrawBackground = function () {
      if (!this.widgets?.some((widget) => widget.name === VIEW)) onDrawBackground?.apply(this, arguments);
    };
    nodeType.prototype.onNodeCreated = function () {
      onNodeCreated?.apply(this, arguments);
      this.hideOutputImages = true;
    };
  },
  /** Results that come back: another workflow's tab, or a run opened from the queue. */
  onNodeOutputsUpdated(outputs) {
    for (const [locator, output] of Object.entries(outputs)) {
      const node = nodeAt(locator);
      if (tells(node?.constructor.nodeData)) show(node, output);
    }
  },
});
