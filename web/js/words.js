// Texts in the page's language. Their English is their key in "specar" of locales/*/main.json; {names} stand for values:
// those of NUMBERS for digits, {verbatim} for what is not translated.
let patterns = [];

const LISTS = ["\n", "; ", ": ", ", "]; // a text that is not a key may be a list of keys

const NUMBERS = ["number", "passes", "plain", "done", "total"];

const value = (name) => `(?<${name}>${NUMBERS.includes(name) ? "-?[\\d.]+%?" : ".+?"})`;
const source = (english) => english.split(/(\{\w+\})/).map((part) =>
  part.startsWith("{") ? value(part.slice(1, -1)) : part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("");
const filled = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name]);

/** To be awaited before anything is shown. */
export async function loadWords(app) {
  const language = app.extensionManager.setting.get("Comfy.Locale");
  if (language === "en") return;
  const words = (await app.api.getCustomNodesI18n())[language]?.specar ?? {};
  patterns = Object.entries(words).map(([english, text]) => [new RegExp(`^${source(english)}$`), text]);
}

/** The translation of a text that is a key; undefined for others. */
export function translation(text) {
  for (const [pattern, words] of patterns) {
    const found = pattern.exec(text);
    if (found) return filled(words, Object.fromEntries(
      Object.entries(found.groups ?? {}).map(([name, value]) => [name, name === "verbatim" ? value : translated(value)])));
  }
}

/** A text of the server or of this pack; what has not been translated stays as it is. */
export function translated(text) {
  const whole = translation(text), separator = LISTS.find((each) => text.includes(each));
  return whole ?? (separator ? text.split(separator).map(translated).join(separator) : text);
}

/** A text of this pack, with values for its {names}. */
export const say = (english, values = {}) => translated(filled(english, values));
