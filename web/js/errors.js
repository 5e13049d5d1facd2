// Why a run failed, or was refused, in red on the node that it is about. ComfyUI's own messages stay.
import { app } from "/scripts/app.js";
import { executingNode } from "./nodes.js";
import { showError } from "./result.js";

const FOLDER = decodeURIComponent(import.meta.url.split("/").at(-3)); // of this pack, in tracebacks
const LOOK = 300; // milliseconds; of a refused prompt no event tells

const ours = (type) => type?.startsWith("SpecAR");
const marked = { failed: [], refused: [] }; // nodes that say so

/** texts: by the id of a node, as the server names it. */
function mark(kind, texts) {
  marked[kind].forEach((node) => showError(node, ""));
  const told = Object.entries(texts).map(([id, text]) => [executingNode(id), text]).filter(([node]) => node);
  told.forEach(([node, text]) => showError(node, text));
  marked[kind] = told.map(([node]) => node);
}

/** Of a node of this pack, or of another that failed in it: VAE Decode, for one. */
function showFailure({ detail: { node_id, node_type, exception_message, traceback } }) {
  if (ours(node_type) || traceback?.some((line) => line.includes(FOLDER))) mark("failed", { [node_id]: exception_message.trim() });
}

/** An error of a refused prompt as a sentence: our own after the input's name and " - ". */
const sentence = ({ type, message, details }) => (type === "custom_validation_failed" ? details.replace(/^\S+ - /, "")
  : `${message}: ${details}.`);

let refusal = null;

function showRefusal() {
  if (app.lastNodeErrors === refusal) return;
  refusal = app.lastNodeErrors;
  const found = Object.entries(refusal ?? {}).filter(([, { class_type }]) => ours(class_type));
  mark("refused", Object.fromEntries(found.map(([id, { errors }]) => [id, errors.map(sentence).join("\n")])));
}

app.registerExtension({
  name: "specar.errors",
  setup() {
    app.api.addEventListener("execution_start", () => mark("failed", {}));
    app.api.addEventListener("execution_error", showFailure);
    setInterval(showRefusal, LOOK);
  },
});
