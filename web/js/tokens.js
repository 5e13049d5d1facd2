// The values of a token, labelled. No access to the page or to ComfyUI.

const FORCED = 5; // a Source, see samplers/trace.py

/** The number of a record at a token; records of nothing but zeros are left out of the files. */
function at(data, field, index) {
  return data.fields[field]?.[index] ?? 0;
}

function words(number) {
  return { inf: "infinite", "-inf": "-infinite", nan: "not a number" }[number] ?? String(number);
}

/**
 * Of the token at `index` (row by row): a title and pairs [name, value].
 * data: a file of reports/token_records.py.
 */
export function describeToken(data, index) {
  const row = Math.floor(index / data.cols) + 1;
  const column = (index % data.cols) + 1;
  const source = at(data, "source", index);
  const title = `row ${row}, column ${column}: ${data.sources[source]}`;
  if (source === FORCED) return { title, pairs: [] };
  const pairs = (data.continuous ? vectorPairs : tokenPairs)(data, (field) => at(data, field, index));
  return { title, pairs: pairs.map(([name, value]) => [name, words(value)]) };
}

function tokenPairs(data, value) {
  const guessed = value("depth") > 0;
  return [
    ["decided in pass", value("finalised_at")],
    ["p of the token", value("p")],
    guessed && ["position in the draft", value("depth")],
    guessed && ["q of the draft token", value("q")],
    guessed && ["p/q of the draft token", value("ratio")],
    "refinements" in data.fields && ["passes as a draft token", value("refinements")],
    ["entropy, nats", value("entropy")],
    ["top-1 probability", value("top1")],
    value("tree_depth") > 0 && ["tree", `${value("tree_depth")} levels, ${value("tree_width")} wide`],
    value("tree_depth") > 0 && guessed && ["rank among siblings", value("rank") + 1],
    "similarity" in data.fields && value("tree_depth") > 0 && ["similarity of the paths", value("similarity")],
    "drift_bound" in data.fields && ["drift bound", value("drift_bound")],
  ].filter(Boolean);
}

function vectorPairs(data, value) {
  const guessed = value("depth") > 0;
  const tries = value("tries");
  return [
    ["decided in pass", value("finalised_at")],
    ["position in the order", value("order")],
    guessed && ["drafted in round", value("block")],
    guessed && ["position in the draft", value("depth")],
    guessed && ["distance", value("distance")],
    guessed && ["log ratio", value("log_ratio")],
    tries !== 0 && ["tries to resample", tries < 0 ? `${-tries}, failed` : tries],
  ].filter(Boolean);
}
