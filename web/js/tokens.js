// What the numbers of a token say, in plain words. No access to the page or to ComfyUI.

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
    ["fixed in pass", value("finalised_at")],
    ["p of the token", value("p")],
    guessed && ["place in the draft", value("depth")],
    guessed && ["q of the guess", value("q")],
    guessed && ["p/q of the guess", value("ratio")],
    "refinements" in data.fields && ["passes as a guess", value("refinements")],
    ["entropy, nats", value("entropy")],
    ["top-1 probability", value("top1")],
    value("tree_depth") > 0 && ["tree", `${value("tree_depth")} levels, ${value("tree_width")} wide`],
    value("tree_depth") > 0 && guessed && ["place among siblings", value("rank") + 1],
    "tv_leak" in data.fields && ["TV leak", value("tv_leak")],
  ].filter(Boolean);
}

function vectorPairs(data, value) {
  const guessed = value("depth") > 0;
  const tries = value("tries");
  return [
    ["fixed in pass", value("finalised_at")],
    ["place in the order", value("order")],
    guessed && ["guessed in round", value("block")],
    guessed && ["place in the draft", value("depth")],
    guessed && ["distance", value("distance")],
    guessed && ["log ratio", value("log_ratio")],
    tries !== 0 && ["tries to redraw", tries < 0 ? `${-tries}, in vain` : tries],
  ].filter(Boolean);
}
