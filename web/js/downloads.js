// What to download for a loader whose choice is not here, on its node as soon as a template opens: ComfyUI's own list of
// missing models has neither folders nor what a model needs besides its file.
import { app } from "/scripts/app.js";
import { showReport } from "./report.js";
import { translated } from "./words.js";

function tell() {
  for (const node of app.graph._nodes.filter((each) => each.properties?.download)) {
    const [{ value, options }] = node.widgets;
    showReport(node, options.values.includes(value) ? "" : translated(node.properties.download.replaceAll("; ", "\n")));
  }
}

app.registerExtension({ name: "specar.downloads", afterConfigureGraph: tell, refreshComboInNodes: tell });
