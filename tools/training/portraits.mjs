// Draws DiceBear avatars: lines of {"style", "options"} -> lines of SVG text as JSON strings. Options name every variant;
// parts of a face that they do not name are left out. Run in a folder with the packages in node_modules.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const installed = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(installed.resolve(`@dicebear/${name}`)));
const { createAvatar } = await load("core");
const styles = {};
for await (const line of createInterface({ input: process.stdin })) {
  const { style, options } = JSON.parse(line);
  const definition = (styles[style] ??= await load(style));
  for (const key of Object.keys(definition.schema.properties)) {
    const part = key.replace(/Probability$/, "");
    if (part !== key) options[key] = part in options ? 100 : 0;
  }
  console.log(JSON.stringify(createAvatar(definition, { seed: "", ...options }).toString()));
}
