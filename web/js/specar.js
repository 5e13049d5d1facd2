// Shows the text that SpecAR's output nodes report ("text" in their UI output) in a read-only field on the node.
import { app } from "/scripts/app.js";
import { ComfyWidgets } from "/scripts/widgets.js";

const FIELD = "report_text";

function reportField(node) {
  const existing = node.widgets?.find((widget) => widget.name === FIELD);
  if (existing) return existing;
  const { widget } = ComfyWidgets.STRING(node, FIELD, ["STRING", { multiline: true }], app);
  widget.serialize = false; // neither in the workflow ...
  widget.options = { ...widget.options, serialize: false, read_only: true }; // ... nor in the prompt
  if (widget.inputEl) widget.inputEl.readOnly = true;
  return widget;
}

app.registerExtension({
  name: "specar.report",
  async beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith("SpecAR") || !nodeData.output_node) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      if (!output?.text) return;
      reportField(this).value = output.text.join("\n");
      this.setDirtyCanvas?.(true, true);
    };
  },
});
