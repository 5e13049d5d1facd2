// A template opens in the page's language: its note, and the names that its nodes, their inputs and groups have of their
// own. Any graph with a note of a template, each line of which is a key, is taken for one.
import { app } from "/scripts/app.js";
import { translated, translation } from "./words.js";

const rename = (part, name) => { if (part[name]) part[name] = translation(part[name]) ?? part[name]; };

app.registerExtension({
  name: "specar.templates",
  beforeConfigureGraph(graph) {
    const graphs = [graph, ...(graph.definitions?.subgraphs ?? [])];
    const [nodes, groups] = ["nodes", "groups"].map((parts) => graphs.flatMap((each) => each[parts] ?? []));
    const notes = nodes.filter(({ type, widgets_values }) => type === "MarkdownNote"
      && widgets_values?.[0]?.split?.(/\n+/).every((line) => translation(line)));
    if (!notes.length) return;
    for (const { widgets_values } of notes) widgets_values[0] = translated(widgets_values[0]);
    for (const part of [...nodes, ...groups]) rename(part, "title");
    for (const slot of [...nodes, ...graphs].flatMap(({ inputs }) => inputs ?? [])) rename(slot, "label");
  },
});
