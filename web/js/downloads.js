// A loader whose choice is not here says what to download, as soon as a template opens: ComfyUI's own list of missing
// models has neither folders nor what a model needs besides one file.
import { app } from "/scripts/app.js";
import { showReport } from "./report.js";
import { translated } from "./words.js";

const MAIN = /\/(((adapter|pytorch)_)?model(-\d+-of-\d+)?|decoder)\.\w+$/; // the file that stands for its folder

/** A choice as its folder's name, which older workflows have. */
const model = (choice) => choice.replaceAll("\\", "/").replace(MAIN, "");

/** Names a model as the list does: a release may have other files, another system another separator. */
function choose(widget) {
  const { value, options: { values } } = widget;
  const here = values.includes(value) ? value : values.find((each) => model(each) === model(value));
  if (here) widget.value = here;
  return here;
}

function tell() {
  for (const node of app.graph._nodes.filter(({ type }) => type?.startsWith("SpecARLoad"))) {
    const widget = node.widgets.find(({ name }) => name.endsWith("_name"));
    const here = widget && choose(widget), { download } = node.properties;
    if (!download) continue;
    const text = `Missing: ${model(widget.value)}. ${download.replace(": ", ":\n").replaceAll("; ", "\n")}`;
    showReport(node, here ? "" : translated(text));
  }
}

app.registerExtension({ name: "specar.downloads", afterConfigureGraph: tell, refreshComboInNodes: tell });
