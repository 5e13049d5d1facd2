// Which nodes are samplers, and where a node is: the open workflow's graphs, and the ids by which the server and the page name a node.
import { app } from "/scripts/app.js";

export const PICTURE = "$$canvas-image-preview"; // ComfyUI's own widget

export const hasSamples = (data) => String(data?.output) === "LATENT,AR_TRACE"; // of samplers; their category is translated
export const isSampler = (node) => hasSamples(node?.constructor.nodeData);
export const rootGraph = () => app.rootGraph ?? app.graph;
export const widgetsOf = (graph) => JSON.stringify(graph.serialize().nodes.map((node) => node.widgets_values));
export const locatorOf = ({ graph, id }) => (graph === rootGraph() ? `${id}` : `${graph.id}:${id}`);

/** The node that outputs belong to: "12", or "<id of a subgraph>:12". */
export function nodeAt(locator) {
  const [id, subgraph] = locator.split(":").reverse(), root = rootGraph();
  return (subgraph ? root.subgraphs?.get(subgraph) : root)?.getNodeById(id);
}

/** The node that is executing: "12", or the ids of subgraph nodes before it ("7:12"). */
export function executingNode(id) {
  const inside = String(id).split(":"), last = inside.pop();
  const graph = inside.reduce((outer, each) => outer?.getNodeById(each)?.subgraph, rootGraph());
  return graph?.getNodeById(last);
}
