// A read-only text on a node.
import { app } from "/scripts/app.js";
import { say } from "./words.js";

const FIELD = "report_text";
const LINES = 10; // that are seen at once, at most
const LINE = 14; // pixels
const BESIDE_IMAGES = 130; // pixels of a report at most, where the node also shows images (for the new renderer: specar.css)

export function widgetOf(node, name, make) {
  return node.widgets?.find((widget) => widget.name === name) ?? make(node);
}

function reportField(node) {
  const { widget } = app.widgets.STRING(node, FIELD, ["STRING", { multiline: true }], app);
  widget.label = say("report");
  widget.serialize = false; // neither in the workflow ...
  widget.options = { ...widget.options, serialize: false, read_only: true }; // ... nor in the prompt
  const field = widget.element ?? widget.inputEl;
  if (field) field.readOnly = true;
  const { getMaxHeight } = widget.options;
  widget.options.getMinHeight = () => Math.min(LINES, widget.value.split("\n").length) * LINE + 2 * LINE;
  widget.options.getMaxHeight = () => (node.imgs?.length ? BESIDE_IMAGES : getMaxHeight?.());
  return widget;
}

/** Shows a text on a node; none: takes it away. */
export function showReport(node, text) {
  if (text) widgetOf(node, FIELD, reportField).value = text;
  else {
    const shown = node.widgets?.find((widget) => widget.name === FIELD);
    if (shown) node.removeWidget(shown);
  }
  node.setDirtyCanvas?.(true, true);
}
